"""How well simulation agrees with reality: calibrated on the spot, and where it was not calibrated.

    python benchmarks/fidelity.py loads [CONFIG ...] [--time-scales 3 2 0.6] [--seeds 3]
        [--requests 200] [--again] [--workload FILE] [--profile FILE] [--model DIR]
    python benchmarks/fidelity.py held-out [CONFIG ...] [--loads 0.5 0.8 1.0 1.1] [--seeds 3]
        [--requests 120] [--workload FILE] [--model DIR] [--threads N]

`loads` runs every configuration live, calibrates the model before and after each load (unless
`--profile` names a profile: a shared machine is not as fast in one minute as in the next), and
simulates. First table: simulated over live, per load and measure. Second: each configuration
against the first; where the live difference is distinguishable from noise, does the simulated one
point the same way? `--again` runs everything live a second time and asks the same of that: no
simulation can agree with a machine better than the machine does with itself. Wants it otherwise
idle.

`held-out` finds the capacity of the first configuration (requests a second when all come at once,
simulated), runs every configuration live at each share of it with a decision log, twice, and
simulates the same requests with step times that are fitted to steps of a log:

    same         of this very policy and load: what calibration can do at best
    policy       of the first configuration at this load: the policy is held out
    load         of this policy at the lowest load: the load is held out
    live again   the second live run beside the first: no simulation agrees better than that

Printed are mean absolute percentage errors of TTFT, gap and end to end, over their mean, median
and p99 with all seeds pooled, and of the throughput: at the knee single runs are chaotic, and so
are both sides. Wants the machine otherwise idle. The last line is JSON.
"""

import asyncio
import gc
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import Args, Opt, Program
from tqdm import tqdm

from aioserve.config import EngineConfig
from aioserve.lab.calibration import Measurements, calibrate, measure, write_profile
from aioserve.lab.comparison.candidates import Candidate, load_candidates
from aioserve.lab.comparison.document import Document, compare
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.run import run_live, simulate, simulated
from aioserve.lab.what_if import read_traffic
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.workload import Workload

CONFIGS = [
    f"configs/{name}.yaml" for name in ("fcfs", "chunked_prefill", "hrrn", "mlfq", "latency_budget")
]
GOAL = 0.15  # relative error that the simulation should stay within, in these measures
MEASURES = [("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99")]
MEASURES += [("totals", "output_tokens_per_second")]
PAIRED = [*MEASURES, ("e2e", "p50"), ("gap", "p99")]  # whose differences are compared
NUM_KV_BLOCKS = 4096  # the same on both sides: the default depends on the runner

program = Program(__doc__)
SHARED: dict[str, Any] = {
    "workload": "configs/workloads/mixed.yaml",
    "seeds": 3,
    "model": Opt(str, "model directory; default: the embedded model"),
    "threads": Opt(int, "of the model; default: one per core"),
}


def overrides_of(args: Args) -> list[tuple[str, Any]]:
    """Return the settings that the live and the simulated side share."""
    overrides: list[tuple[str, Any]] = [("cache.num_kv_blocks", NUM_KV_BLOCKS)]
    if args.model is not None:
        overrides.append(("model.model", args.model))
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
    profile=Opt(str, "step times; default: calibrate on the spot"),
    **SHARED,
)
def loads(args: Args) -> dict[str, Any]:
    """The same requests live and simulated, at several loads."""
    overrides = overrides_of(args)
    config = EngineConfig.load(None, overrides)
    with tempfile.TemporaryDirectory() as folder:
        profile = args.profile or str(Path(folder) / "profile.yaml")
        before = asyncio.run(measure(config)) if args.profile is None else None
        cells = "".join(f"{' '.join(pair)[:17]:>18}" for pair in MEASURES)
        print(f"{'load':>10}  {'live; others as multiples':26}{cells}")
        rows: dict[str, list[dict[str, Any]]] = {"simulated": []}
        pairs: dict[str, list[dict[str, Any]]] = {"simulated": []}
        if args.again:
            rows["again"], pairs["again"] = [], []
        for scale in args.time_scales:
            source = WorkloadSource(path=args.workload, time_scale=scale, limit=args.requests)
            workloads = [source.load(seed) for seed in range(args.seeds)]
            label = f"{len(workloads[0].requests) / workloads[0].duration:.1f} req/s"
            candidates = load_candidates(args.configs, overrides)
            live = run(candidates, workloads, label, is_live=True)
            if before is not None:
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
        source = WorkloadSource(
            path=self._args.workload, time_scale=time_scale, limit=self._args.requests
        )
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
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(args, Path(scratch))
        _, warm = bench.live(first, 1.0)
        rate, scale = bench.capacity(first, warm)
        print(f"capacity: {rate:.1f} requests/s under {names[first]}")
        measured, profiles, again = {}, {}, {}
        for load, config in itertools.product(args.loads, args.configs):
            measured[load, config], profiles[load, config] = bench.live(config, scale / load)
            again[load, config], _ = bench.live(config, scale / load)
        print(
            f"{'load':>5}  {'policy':16} {'predicted from':12}"
            + "".join(f"{m:>12}" for m in HELD_OUT_MEASURES)
        )
        for load, config in itertools.product(args.loads, args.configs):
            fitted = {"same": (load, config), "policy": (load, first), "load": (lowest, config)}
            for what, source in fitted.items():
                if what == "same" or source != (load, config):
                    found = bench.simulated(config, profiles[source], scale / load)
                    rows.append((load, names[config], what, errors(measured[load, config], found)))
            found = again[load, config]
            rows.append((load, names[config], "live again", errors(measured[load, config], found)))
        for load, name, what, found_errors in rows:
            cells = "".join(f"{100 * found_errors[m]:11.1f}%" for m in HELD_OUT_MEASURES)
            print(f"{load:5.2f}  {name:16} {what:12}{cells}")
        print("\nmeans over the policies")
        for load, what in itertools.product(args.loads, ("same", "policy", "load", "live again")):
            own = [e for at, _, kind, e in rows if at == load and kind == what]
            if own:
                cells = "".join(
                    f"{100 * np.mean([e[m] for e in own]):11.1f}%" for m in HELD_OUT_MEASURES
                )
                print(f"{load:5.2f}  {'':16} {what:12}{cells}")
    keys = ("load", "policy", "predicted_from", "errors")
    return {"rows": [dict(zip(keys, row, strict=True)) for row in rows]}


if __name__ == "__main__":
    program.main()
