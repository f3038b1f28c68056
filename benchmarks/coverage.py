"""How often the lab's 95% intervals cover the truth, below, at and above a server's capacity.

    python benchmarks/coverage.py [--pool 100] [--replicates 40] [--loads 0.5 0.9 1.1]

Runs two policies on many seeds of a workload, at these shares of the capacity (the throughput of
the first policy when all requests come at once). The truth is the difference over all seeds. Each
replicate compares the policies on a few of the seeds, none of them in two replicates until all
were used, and its intervals either cover the truth or not. The table has, for each row of
`compare` and each number of seeds, the share of the intervals that cover it, of the replicates
that got an interval at all ("-": none did). Then the verdicts: how many say better or worse with
the wrong sign, and how many of those where the truth is above 5% of the first policy's value.
Last, how many rows are called better or worse where the two configurations differ in the seed of
their step times' jitter alone. The last line is JSON.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from harness import Args, Opt, Program

from aioserve.lab.comparison.candidates import Candidate, load_candidates, prepare
from aioserve.lab.comparison.document import differences, sampling_of, summarize
from aioserve.lab.comparison.measures import ROWS, Row, RunMeasures, value_of, verdict
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.parallel import choose_num_jobs, simulate_all
from aioserve.lab.simulation.run import simulate
from aioserve.lab.slo import ServiceLevels, Slo
from aioserve.lab.workloads.synthetic import generate, read_spec
from aioserve.lab.workloads.workload import Workload
from aioserve.support.files import find_workload

SLO = ServiceLevels(Slo(ttft=0.5, tpot=0.05))
SURELY_WRONG = 0.05  # of the first configuration's value
NOT_OF_TIME = ("prefix_hit_share", "draft_tokens")


program = Program(__doc__)


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


def measure(
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


def print_table(tallies: dict[str, Tally]) -> None:
    """A line for each row of `compare`, a column for each case."""
    labels = list(dict.fromkeys(label for t in tallies.values() for label in t.covered))
    print(f"{'95% intervals that cover, %':30}" + "".join(f"{name:>14}" for name in tallies))
    for label in labels:
        cells = [share(t.covered.get(label, []), t, len(labels)) for t in tallies.values()]
        print(f"{label:30}" + "".join(f"{cell:>14}" for cell in cells))
    worst = [
        [100 * float(np.mean(c)) for c in t.covered.values() if c] or [np.nan]
        for t in tallies.values()
    ]
    cells = [f"{min(w):.0f} to {max(w):.0f}" for w in worst]
    print(f"{'least and most':30}" + "".join(f"{cell:>14}" for cell in cells))
    cells = [f"{t.wrong_signs} of {t.told_apart}" for t in tallies.values()]
    print(f"{'verdicts of the wrong sign':30}" + "".join(f"{cell:>14}" for cell in cells))
    cells = [f"{t.surely_wrong_signs}" for t in tallies.values()]
    print(f"{'  where the truth is above 5%':30}" + "".join(f"{cell:>14}" for cell in cells))


def share(covered: list[bool], tally: Tally, num_labels: int) -> str:
    """In percent; and of how many intervals, where not all replicates had one."""
    if not covered:
        return "-"
    all_of_them = tally.num_rows // max(len(tally.covered), 1)
    of = "" if len(covered) == all_of_them else f" ({len(covered)})"
    return f"{100 * float(np.mean(covered)):.0f}{of}"


def with_settings(candidate: Candidate, jitter: float, seed: int) -> Candidate:
    """Whose steps take times that vary, by a generator of this seed."""
    runner = msgspec.structs.replace(candidate.config.runner, step_jitter=jitter, seed=seed)
    config = msgspec.structs.replace(candidate.config, runner=runner)
    return msgspec.structs.replace(candidate, config=config)


@program.command(
    words={"configs": ["fcfs", "chunked_prefill"]},
    workload="mixed",
    requests=400,
    loads=Opt([0.5, 0.9, 1.1], "shares of the capacity"),
    seeds=Opt([1, 5], "of a replicate"),
    pool=Opt(100, "seeds that the truth is from"),
    replicates=40,
    jitter=Opt(0.1, "of step times, for equal ones"),
    jobs=Opt(int, "processes for simulated runs; default: one per core"),
)
def main(args: Args) -> dict[str, Any]:
    """Runs of both at each load, and comparisons of a few seeds of them."""
    candidates = load_candidates(args.configs)
    spec = msgspec.structs.replace(
        read_spec(find_workload(args.workload)), num_requests=args.requests
    )
    workloads = [generate(spec, seed) for seed in range(args.pool)]
    (first, second), workloads, _ = prepare(candidates, workloads, is_live=False, clip=False)
    rate = capacity(first, workloads[0])
    own_rate = args.requests / workloads[0].duration
    print(f"{first.name} against {second.name}: {first.name} can do {rate:.1f} requests/s")
    num_jobs = args.jobs or choose_num_jobs(workloads, 1)
    tallies: dict[str, Tally] = {}
    equals: dict[str, Tally] = {}
    for load in args.loads:
        scaled = [workload.scaled(own_rate / (load * rate)) for workload in workloads]
        twins = [with_settings(first, args.jitter, seed) for seed in (1, 2)]
        runs = [measure(each, scaled, num_jobs) for each in (first, second, *twins)]
        for num_seeds in args.seeds:
            label = f"{load:g}, {num_seeds} seed" + "s" * (num_seeds > 1)
            tallies[label] = tally(Case(num_seeds, *runs[:2]), args.replicates)
            case = Case(num_seeds, *runs[2:])
            equals[label] = tally(case, args.replicates, truth_is_zero=True)
    print_table(tallies)
    cells = [f"{t.told_apart} of {t.num_rows}" for t in equals.values()]
    print(f"{'equal ones told apart':30}" + "".join(f"{cell:>14}" for cell in cells))
    return {"capacity": rate, "cases": tallies, "equal": equals}


if __name__ == "__main__":
    program.main()
