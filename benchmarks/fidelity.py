"""How well simulation agrees with reality, and how often the lab's intervals cover the truth.

    python benchmarks/fidelity.py loads [CONFIG ...] [--time-scales 3 2 0.6] [--seeds 3]
        [--requests 200] [--again]
    python benchmarks/fidelity.py held-out [--seeds 3] [--requests 120]
    python benchmarks/fidelity.py coverage [--pool 100] [--replicates 40]

`loads` runs every configuration live, calibrates the model before and after each load (a shared
machine is not as fast in one minute as in the next), and simulates. First table: simulated over
live, per load and measure. Second: each configuration against the first; where the live difference
is distinguishable from noise, does the simulated one point the same way? `--again` runs everything
live a second time and asks the same of that: no simulation can agree with a machine better than the
machine does with itself. Wants it otherwise idle.

`held-out` finds the capacity of the first configuration (requests a second when all come at once,
simulated), runs every configuration live at each share of it with a decision log, twice, and
simulates the same requests with step times that are fitted to steps of a log:

    same         of this very policy and load: what calibration can do at best
    policy       of the first configuration at this load: the policy is held out
    load         of this policy at the lowest load: the load is held out
    live again   the second live run beside the first: no simulation agrees better than that

Printed are mean absolute percentage errors of TTFT, gap and end to end, over their mean, median
and p99 with all seeds pooled, and of the throughput: at the knee single runs are chaotic, and so
are both sides. Wants the machine otherwise idle.

`coverage`: how often the lab's 95% intervals cover the truth, below, at and above a server's
capacity. Runs two policies on many seeds of a workload, at these shares of the capacity (the
throughput of the first policy when all requests come at once). The truth is the difference over all
seeds. Each replicate compares the policies on a few of the seeds, none of them in two replicates
until all were used, and its intervals either cover the truth or not. The table has, for each row of
`compare` and each number of seeds, the share of the intervals that cover it, of the replicates that
got an interval at all ("-": none did). Then the verdicts: how many say better or worse with the
wrong sign, and how many of those where the truth is above 5% of the first policy's value. Last, how
many rows are called better or worse where the two configurations differ in the seed of their step
times' jitter alone. The last line is JSON.
"""

import asyncio
import gc
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from harness import Args, Opt, Program, Table
from tqdm import tqdm

from aioserve.config import EngineConfig
from aioserve.lab.calibration import Measurements, calibrate, measure, write_profile
from aioserve.lab.comparison.candidates import Candidate, load_candidates, prepare
from aioserve.lab.comparison.document import (
    Document,
    compare,
    differences,
    sampling_of,
    summarize,
)
from aioserve.lab.comparison.measures import ROWS, Row, RunMeasures, value_of, verdict
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.parallel import choose_num_jobs, simulate_all
from aioserve.lab.simulation.run import run_live, simulate, simulated
from aioserve.lab.slo import ServiceLevels, Slo
from aioserve.lab.what_if import read_traffic
from aioserve.lab.workloads.synthetic import WorkloadSource, generate, read_spec
from aioserve.lab.workloads.workload import Workload

CONFIGS = [
    f"configs/{name}.yaml" for name in ("fcfs", "chunked_prefill", "hrrn", "mlfq", "latency_budget")
]
GOAL = 0.15  # relative error that the simulation should stay within, in these measures
MEASURES = [("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99")]
MEASURES += [("totals", "output_tokens_per_second")]
PAIRED = [*MEASURES, ("e2e", "p50"), ("gap", "p99")]  # whose differences are compared
NUM_KV_BLOCKS = 4096  # the same on both sides: the default depends on the runner

WORKLOAD = "configs/workloads/mixed.yaml"

program = Program(__doc__)
SHARED: dict[str, Any] = {
    "seeds": 3,
    "threads": Opt(int, "of the model; default: one per core"),
}


def overrides_of(args: Args) -> list[tuple[str, Any]]:
    """Return the settings that the live and the simulated side share."""
    overrides: list[tuple[str, Any]] = [
        ("cache.num_kv_blocks", NUM_KV_BLOCKS),
        ("speculation.speculative_method", "none"),  # simulated texts do not repeat themselves
    ]
    if args.threads is not None:
        overrides.append(("runner.threads", args.threads))
    return overrides


def value(result: dict[str, Any], measure_name: str, statistic: str) -> float:
    """One number of one configuration's result."""
    if measure_name == "totals":
        return float(result["totals"][statistic])
    return float(result["durations"][measure_name][statistic])


def run(
    candidates: list[Candidate], workloads: list[Workload], label: str, *, is_live: bool
) -> Document:
    """Every candidate on every workload."""
    gc.collect()
    total = len(candidates) * sum(len(workload.requests) for workload in workloads)
    with tqdm(total=total, desc=label, unit="req", disable=not sys.stderr.isatty()) as bar:
        return compare(candidates, workloads, is_live=is_live, progress=bar.update)


def together(before: Measurements, after: Measurements) -> Measurements:
    """Both, as one."""
    return before._replace(
        steps=before.steps + after.steps, first_tokens=before.first_tokens + after.first_tokens
    )


def ratios(label: str, what: str, live: Document, simulated: Document) -> list[dict[str, Any]]:
    """Per configuration and measure: live, simulated, and their ratio; printed as they come.

    `what` is "simulated", or "again" for a second live run in its place.
    """
    rows = []
    for real, model in zip(live["results"], simulated["results"], strict=True):
        cells = []
        for measure_name, statistic in MEASURES:
            a, b = value(real, measure_name, statistic), value(model, measure_name, statistic)
            rows.append(
                {
                    "load": label,
                    "config": real["name"],
                    "measure": f"{measure_name} {statistic}",
                    "live": a,
                    what: b,
                }
            )
            unit, scale = ("", 1.0) if measure_name == "totals" else ("ms", 1e3)
            mark = " " if abs(b / a - 1) <= GOAL else "*"
            cells.append(f"{scale * a:8.1f}{unit} {b / a:5.2f}{mark}")
        print(f"{label:>10}  {what:9} {real['name']:16}" + "".join(f"{c:>18}" for c in cells))
    return rows


def directions(label: str, what: str, live: Document, simulated: Document) -> list[dict[str, Any]]:
    """Where the live difference to the first configuration is sure: is the simulated one alike?"""
    found = []
    pairs = list(zip(live["results"], simulated["results"], strict=True))
    for real, model in pairs[1:]:
        for measure_name, statistic in PAIRED:
            a = real["against_first"]["differences"][measure_name].get(statistic)
            b = model["against_first"]["differences"][measure_name].get(statistic)
            if a is None or b is None or not a["is_distinguishable"]:
                continue
            found.append(
                {
                    "load": label,
                    "pair": f"{real['name']} against {pairs[0][0]['name']}",
                    "measure": f"{measure_name} {statistic}",
                    "live": a["value"],
                    what: b["value"],
                    "agree": a["value"] * b["value"] > 0,
                }
            )
    return found


@program.command(
    "loads",
    {"configs": CONFIGS},
    time_scales=[3.0, 2.0, 0.6],
    requests=200,
    again=Opt(False, "run live a second time, too"),
    **SHARED,
)
def loads(args: Args) -> dict[str, Any]:
    """The same requests live and simulated, at several loads."""
    overrides = overrides_of(args)
    config = EngineConfig.load(None, overrides)
    with tempfile.TemporaryDirectory() as folder:
        profile = str(Path(folder) / "profile.yaml")
        before = asyncio.run(measure(config))
        cells = "".join(f"{' '.join(pair)[:17]:>18}" for pair in MEASURES)
        print(f"{'load':>10}  {'live; others as multiples':26}{cells}")
        rows: dict[str, list[dict[str, Any]]] = {"simulated": []}
        pairs: dict[str, list[dict[str, Any]]] = {"simulated": []}
        if args.again:
            rows["again"], pairs["again"] = [], []
        for scale in args.time_scales:
            source = WorkloadSource(path=WORKLOAD, time_scale=scale, limit=args.requests)
            workloads = [source.load(seed) for seed in range(args.seeds)]
            label = f"{len(workloads[0].requests) / workloads[0].duration:.1f} req/s"
            candidates = load_candidates(args.configs, overrides)
            live = run(candidates, workloads, label, is_live=True)
            after = asyncio.run(measure(config))
            step_time = calibrate(together(before, after))
            write_profile(step_time, profile)
            print(f"{label:>10}  calibrated: {step_time.error}")
            before = after
            candidates = load_candidates(args.configs, [*overrides, ("runner.profile", profile)])
            for what in rows:
                other = run(candidates, workloads, label, is_live=what == "again")
                rows[what] += ratios(label, what, live, other)
                pairs[what] += directions(label, what, live, other)
    print(
        f"\n* off by more than {GOAL:.0%}; live differences that are sure, and these differences:"
    )
    for what in pairs:
        for pair in pairs[what]:
            sign = "agrees" if pair["agree"] else "DIFFERS"
            print(
                f"{pair['load']:>10}  {what:9} {pair['pair']:32} {pair['measure']:32}"
                f"{pair['live']:+10.4f} {pair[what]:+10.4f}  {sign}"
            )
    for what in rows:
        within = [abs(row[what] / row["live"] - 1) <= GOAL for row in rows[what]]
        agree = [pair["agree"] for pair in pairs[what]]
        print(
            f"{what}: {sum(within)} of {len(within)} within {GOAL:.0%}; "
            f"{sum(agree)} of {len(agree)} agree"
        )
    return {"measures": rows, "directions": pairs}


# Held out.


HELD_OUT = [f"configs/{name}.yaml" for name in ("fcfs", "chunked_prefill", "mlfq")]
AT_ONCE = 1e-6  # time scale at which all requests come at one time
HELD_OUT_MEASURES = ("TTFT", "gap", "end to end", "tokens/s")

Floats = npt.NDArray[np.float64]


def pooled(outcomes: list[RunOutcome]) -> dict[str, Floats]:
    """By measure: mean, median and p99 over all requests of all seeds; of the throughput one."""
    requests = [request for outcome in outcomes for request in outcome.requests]
    gaps = np.concatenate([np.diff(np.frombuffer(r.token_times)) for r in requests])
    values = {
        "TTFT": np.array([r.ttft for r in requests]),
        "gap": gaps,
        "end to end": np.array([r.end - r.arrival for r in requests]),
    }
    found = {
        name: np.array([np.mean(v), np.median(v), np.quantile(v, 0.99)])
        for name, v in values.items()
    }
    num_tokens = sum(len(r.token_times) for r in requests)
    found["tokens/s"] = np.array([num_tokens / sum(outcome.end for outcome in outcomes)])
    return found


def errors(live: dict[str, Floats], other: dict[str, Floats]) -> dict[str, float]:
    """By measure: the mean absolute error of `other` as a share of `live`."""
    return {
        name: float(np.mean(np.abs(other[name] / live[name] - 1))) for name in HELD_OUT_MEASURES
    }


class Bench:
    """The configurations, and the folder in which logs and profiles lie."""

    def __init__(self, args: Args, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._overrides = overrides_of(args)

    def workloads(self, time_scale: float) -> list[Workload]:
        """The requests of each seed, in `time_scale` times their time."""
        source = WorkloadSource(path=WORKLOAD, time_scale=time_scale, limit=self._args.requests)
        return [source.load(seed) for seed in range(self._args.seeds)]

    def live(self, config: str, time_scale: float) -> tuple[dict[str, Floats], str]:
        """What was measured, and a profile that is fitted to the steps of the first seed."""
        outcomes = []
        log = self._folder / "log"
        for seed, workload in enumerate(self.workloads(time_scale)):
            noted = [("scheduler.decision_log", str(log))] if seed == 0 else []
            outcomes.append(run_live(self._load(config, *noted), workload))
        profile = self._folder / f"{len(list(self._folder.iterdir()))}.yaml"
        write_profile(read_traffic(DecisionLog(str(log))).step_time, str(profile))
        return pooled(outcomes), str(profile)

    def simulated(self, config: str, profile: str, time_scale: float) -> dict[str, Floats]:
        """What the same requests measure when steps take the time of that profile."""
        settings = simulated(self._load(config, ("runner.profile", profile)))
        return pooled([simulate(settings, load) for load in self.workloads(time_scale)])

    def capacity(self, config: str, profile: str) -> tuple[float, float]:
        """Requests a second when all come at once, and the time scale that asks for as many."""
        once = self.workloads(AT_ONCE)
        outcomes = [
            simulate(simulated(self._load(config, ("runner.profile", profile))), load)
            for load in once
        ]
        rate = sum(len(o.requests) for o in outcomes) / sum(o.end for o in outcomes)
        asked = self.workloads(1.0)
        usual = sum(len(w.requests) for w in asked) / sum(w.duration for w in asked)
        return rate, usual / rate

    def _load(self, config: str, *more: tuple[str, Any]) -> EngineConfig:
        (candidate,) = load_candidates([config], [*self._overrides, *more])
        return candidate.config


@program.command(
    "held-out", {"configs": HELD_OUT}, loads=[0.5, 0.8, 1.0, 1.1], requests=120, **SHARED
)
def held_out(args: Args) -> dict[str, Any]:
    """Step times that are fitted to another policy, or to another load."""
    names = {config: Path(config).stem for config in args.configs}
    first, lowest = args.configs[0], min(args.loads)
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args, Path(scratch))
        _, warm = bench.live(first, 1.0)
        rate, scale = bench.capacity(first, warm)
        print(f"capacity: {rate:.1f} requests/s under {names[first]}")
        measured, profiles, again = {}, {}, {}
        for load, config in itertools.product(args.loads, args.configs):
            measured[load, config], profiles[load, config] = bench.live(config, scale / load)
            again[load, config], _ = bench.live(config, scale / load)
        heads = {"load": "5.2f", "policy": ">18", "predicted from": ">16"}
        table = Table({**heads, **dict.fromkeys(HELD_OUT_MEASURES, "12.1%")})

        def add(load: float, policy: str, what: str, found: dict[str, float]) -> None:
            table.add({"load": load, "policy": policy, "predicted from": what, **found})

        for load, config in itertools.product(args.loads, args.configs):
            real, name = measured[load, config], names[config]
            fitted = {"same": (load, config), "policy": (load, first), "load": (lowest, config)}
            for what, source in fitted.items():
                if what == "same" or source != (load, config):
                    found = bench.simulated(config, profiles[source], scale / load)
                    add(load, name, what, errors(real, found))
            add(load, name, "live again", errors(real, again[load, config]))
        for load, what in itertools.product(args.loads, ("same", "policy", "load", "live again")):
            own = [r for r in table.rows if (r["load"], r["predicted from"]) == (load, what)]
            if own:
                means = {m: float(np.mean([row[m] for row in own])) for m in HELD_OUT_MEASURES}
                add(load, "mean", what, means)
    return {"rows": table.rows}


# Coverage of intervals.


NUM_REQUESTS = 400
SLO = ServiceLevels(Slo(ttft=0.5, tpot=0.05))
SURELY_WRONG = 0.05  # of the first configuration's value
NOT_OF_TIME = ("prefix_hit_share", "draft_tokens")


class Case(NamedTuple):
    """How many seeds a replicate has, and the runs of both configurations to draw them from."""

    num_seeds: int
    first: list[RunMeasures]
    second: list[RunMeasures]


class Tally(NamedTuple):
    """What intervals did, by row, over the replicates of a case."""

    covered: dict[str, list[bool]]  # of the intervals that there were
    wrong_signs: int  # of the verdicts
    surely_wrong_signs: int
    told_apart: int  # verdicts of better, worse, higher or lower
    num_rows: int  # over all replicates


def measures(
    candidate: Candidate, workloads: Sequence[Workload], num_jobs: int
) -> list[RunMeasures]:
    """One run for each workload, in virtual time; as fleets of one, which are simulated quicker and
    give the same.
    """
    runs = [(candidate.config, workload, Fleet(1, "round_robin")) for workload in workloads]
    outcomes = simulate_all(runs, num_jobs, lambda count: None)
    return [RunMeasures(o, w, SLO) for o, w in zip(outcomes, workloads, strict=True)]


def capacity(candidate: Candidate, workload: Workload) -> float:
    """Requests per second, when all of them come at once."""
    run = RunMeasures(simulate(candidate.config, workload.scaled(1e-6)), workload, None)
    return float(run.totals["requests_per_second"])


def draws(num_runs: int, num_seeds: int, num_replicates: int) -> Iterator[list[int]]:
    """Sets of seeds: disjoint, until all seeds were used."""
    rng = np.random.default_rng(1)
    left: list[int] = []
    for _ in range(num_replicates):
        if len(left) < num_seeds:
            left = [int(i) for i in rng.permutation(num_runs)]
        yield [left.pop() for _ in range(num_seeds)]


def tally(case: Case, num_replicates: int, *, truth_is_zero: bool = False) -> Tally:
    """Compare the two on a few seeds at a time, and see what the intervals cover."""
    truths = summarize(case.first), summarize(case.second)
    rows = [row for row in ROWS if is_measured(row, *truths)]
    covered: dict[str, list[bool]] = {row.label: [] for row in rows}
    wrong = surely_wrong = told_apart = 0
    for places in draws(len(case.first), case.num_seeds, num_replicates):
        first, second = ([runs[i] for i in places] for runs in (case.first, case.second))
        found = compared(first, second)
        for row in rows:
            base, other = (value_of(truth, row) for truth in truths)
            truth = 0.0 if truth_is_zero else other - base
            difference = found[row.measure].get(row.statistic)
            if difference is None or difference["low"] is None or difference["is_nothing"]:
                continue  # "the same" says what was measured, and promises nothing
            low, high = (difference[end] * row.factor for end in ("low", "high"))
            # Six digits are kept of a document's numbers.
            covered[row.label].append(low - 1e-5 * abs(low) <= truth <= high + 1e-5 * abs(high))
            if verdict(difference, row, base) in ("better", "worse", "higher", "lower"):
                told_apart += 1
                is_wrong = difference["value"] * truth <= 0
                wrong += is_wrong
                surely_wrong += is_wrong and abs(truth) > SURELY_WRONG * abs(base)
    num_rows = num_replicates * len(rows)
    return Tally(covered, wrong, surely_wrong, told_apart, num_rows)


def compared(first: list[RunMeasures], second: list[RunMeasures]) -> dict[str, Any]:
    """Differences with intervals, as `compare` finds them."""
    return differences(first, second, sampling_of(first, second, is_live=False))


def is_measured(row: Row, *results: dict[str, Any]) -> bool:
    """Whether the row has a value, and an interval: maxima have none."""
    if row.statistic == "max" or row.statistic in NOT_OF_TIME:
        return False
    values = [value_of(result, row) for result in results]
    return not any(np.isnan(value) for value in values) and any(values)


def print_table(tallies: dict[str, Tally], equals: dict[str, Tally]) -> None:
    """A line for each row of `compare`, a column for each case."""
    labels = list(dict.fromkeys(label for t in tallies.values() for label in t.covered))
    table = Table({(head := "95% intervals that cover, %"): "<30", **dict.fromkeys(tallies, ">14")})

    def add(what: str, cell: Callable[[Tally], str], of: dict[str, Tally] = tallies) -> None:
        table.add({head: what, **{name: cell(tally) for name, tally in of.items()}})

    def worst(tally: Tally) -> str:
        shares = [100 * float(np.mean(c)) for c in tally.covered.values() if c] or [np.nan]
        return f"{min(shares):.0f} to {max(shares):.0f}"

    for label in labels:
        add(label, lambda t, label=label: share(t.covered.get(label, []), t))  # type: ignore[misc]
    add("least and most", worst)
    add("verdicts of the wrong sign", lambda t: f"{t.wrong_signs} of {t.told_apart}")
    add("  where the truth is above 5%", lambda t: f"{t.surely_wrong_signs}")
    add("equal ones told apart", lambda t: f"{t.told_apart} of {t.num_rows}", equals)


def share(covered: list[bool], tally: Tally) -> str:
    """In percent; and of how many intervals, where not all replicates had one."""
    if not covered:
        return "-"
    all_of_them = tally.num_rows // max(len(tally.covered), 1)
    of = "" if len(covered) == all_of_them else f" ({len(covered)})"
    return f"{100 * float(np.mean(covered)):.0f}{of}"


def with_jitter(candidate: Candidate, seed: int) -> Candidate:
    """Whose steps take times that vary, by a generator of this seed."""
    runner = msgspec.structs.replace(candidate.config.runner, step_jitter=0.1, seed=seed)
    config = msgspec.structs.replace(candidate.config, runner=runner)
    return msgspec.structs.replace(candidate, config=config)


@program.command(
    "coverage",
    pool=Opt(100, "seeds that the truth is from"),
    replicates=40,
    jobs=Opt(int, "processes for simulated runs; default: one per core"),
)
def coverage(args: Args) -> dict[str, Any]:
    """Runs of both at each load, and comparisons of a few seeds of them."""
    candidates = load_candidates(["fcfs", "chunked_prefill"])
    spec = msgspec.structs.replace(read_spec(WORKLOAD), num_requests=NUM_REQUESTS)
    workloads = [generate(spec, seed) for seed in range(args.pool)]
    (first, second), workloads, _ = prepare(candidates, workloads, is_live=False, clip=False)
    rate = capacity(first, workloads[0])
    own_rate = NUM_REQUESTS / workloads[0].duration
    print(f"{first.name} against {second.name}: {first.name} can do {rate:.1f} requests/s")
    num_jobs = args.jobs or choose_num_jobs(workloads, 1)
    tallies: dict[str, Tally] = {}
    equals: dict[str, Tally] = {}
    for load in (0.5, 0.9, 1.1):
        scaled = [workload.scaled(own_rate / (load * rate)) for workload in workloads]
        twins = [with_jitter(first, seed) for seed in (1, 2)]
        runs = [measures(each, scaled, num_jobs) for each in (first, second, *twins)]
        for num_seeds in (1, 5):
            label = f"{load:g}, {num_seeds} seed" + "s" * (num_seeds > 1)
            tallies[label] = tally(Case(num_seeds, *runs[:2]), args.replicates)
            case = Case(num_seeds, *runs[2:])
            equals[label] = tally(case, args.replicates, truth_is_zero=True)
    print_table(tallies, equals)
    return {"capacity": rate, "cases": tallies, "equal": equals}


if __name__ == "__main__":
    program.main()
