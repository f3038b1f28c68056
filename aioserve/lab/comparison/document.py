"""The same requests under several configurations: which is better, by how much, and is it sure?

Runs every configuration on every seed, in rounds, groups the requests by client and by class, and
puts all numbers into one document of plain data. Knows nothing about how it is shown.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.comparison.bootstrap import (
    Difference,
    Sampling,
    compare_gaps,
    compare_requests,
    compare_seeds,
    sample_one,
    sample_seeds,
)
from aioserve.lab.comparison.candidates import (
    Candidate,
    machines,
    other_differences,
    prepare,
    stated_weights,
    watts_of,
)
from aioserve.lab.comparison.measures import (
    PER_REQUEST,
    Reader,
    Row,
    RunMeasures,
    aborts,
    energy_totals,
    fleet_totals,
    good_totals,
    key,
    one_by_one,
    over_seeds,
    price_totals,
    programs_of,
    signed,
    span,
    tidy,
    value_of,
    verdict,
)
from aioserve.lab.comparison.service import Floats, service_bound
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.parallel import simulate_all
from aioserve.lab.simulation.run import Progress, run_live
from aioserve.lab.slo import ServiceLevels, Slo, StatedSlo
from aioserve.lab.workloads.workload import Workload
from aioserve.model_source.info import ModelInfo
from aioserve.runner.simulated import SimulatedRunner

if TYPE_CHECKING:
    from aioserve.lab.simulation.fleet_plan import Fleet
    from aioserve.lab.simulation.fleet_replicas import FleetOutcome
    from aioserve.lab.what_if import Traffic

NUM_POINTS = 240  # of a curve over time
NUM_STEPS = 160  # bars in the step timeline of the first configuration
MAX_STEPS = 600  # and at most in those of the others
MAX_USERS = 8  # with a curve of their own


# Evenly up to 90%, then evenly in nines: tails are what most differences are about.
SHARES = np.concatenate([np.linspace(0, 0.9, 91)[:-1], 1 - 10 ** -np.linspace(1, 3, 61)])


def distributions(runs: list[RunMeasures]) -> dict[str, list[float]]:
    """Quantiles of each measure over all seeds, in seconds: the CDFs, read sideways."""
    curves = {"shares": [tidy(share) for share in SHARES]}
    for name in ("ttft", "gaps", "tpot", "e2e"):
        values = np.concatenate([np.asarray(getattr(run, name), dtype=float) for run in runs])
        values = np.sort(values[~np.isnan(values)])
        places = np.minimum((SHARES * len(values)).astype(int), len(values) - 1)
        curves[name] = [tidy(v) for v in values[places]] if len(values) else []
    return curves


def timelines(
    outcome: RunOutcome, workload: Workload, window: list[float] | None = None
) -> dict[str, Any]:
    """Queue, memory and service over time, and the steps from second to second of `window`; by
    default of one around the moment at which most requests waited.
    """
    states = outcome.states
    time = np.frombuffer(states.time)
    keep = np.unique(np.linspace(0, max(len(time) - 1, 0), NUM_POINTS).astype(int))
    keep = keep[keep < len(time)]
    return {
        "time": [tidy(t) for t in time[keep]],
        "waiting": [states.num_waiting[i] for i in keep],
        "running": [states.num_running[i] for i in keep],
        "kv_usage": [tidy(states.kv_usage[i]) for i in keep],
        "service": _service(outcome, workload),
        "steps": _steps(outcome, window or _busy_window(outcome)),
    }


def _service(outcome: RunOutcome, workload: Workload) -> dict[str, Any]:
    """Return tokens served to each user until each time; a prompt counts when its first token is
    out.
    """
    by_user: dict[str, list[tuple[Floats, Floats]]] = {}
    for request, result in zip(workload.requests, outcome.requests, strict=True):
        if result.token_times:
            times = np.frombuffer(result.token_times)
            tokens = np.ones(len(times))
            tokens[0] += request.num_prompt_tokens
            by_user.setdefault(request.user, []).append((times, tokens))
    grid = np.linspace(0, outcome.end, NUM_POINTS)
    curves: dict[str, Floats] = {}
    for user, parts in by_user.items():
        times = np.concatenate([t for t, _ in parts])
        order = np.argsort(times, kind="stable")
        served = np.concatenate([[0], np.cumsum(np.concatenate([n for _, n in parts])[order])])
        curves[user or "everybody"] = served[np.searchsorted(times[order], grid, side="right")]
    largest = sorted(curves, key=lambda user: (-curves[user][-1], user))
    shown = {user: curves[user] for user in largest[:MAX_USERS]}
    if len(largest) > MAX_USERS:
        shown[f"{len(largest) - MAX_USERS} others"] = sum(
            (curves[user] for user in largest[MAX_USERS:]), np.zeros(NUM_POINTS)
        )
    return {
        "time": [tidy(t) for t in grid],
        "users": {user: [int(n) for n in curve] for user, curve in shown.items()},
    }


def _busy_window(outcome: RunOutcome) -> list[float]:
    """Begin and end, in seconds, of `NUM_STEPS` steps around the moment of the longest queue."""
    steps, states = outcome.steps, outcome.states
    if not steps.start:
        return [0.0, 1.0]
    fullest = states.time[int(np.argmax(states.num_waiting))] if states.time else 0.0
    middle = int(np.searchsorted(np.frombuffer(steps.start), fullest))
    first = max(0, min(middle - NUM_STEPS // 3, len(steps.start) - NUM_STEPS))
    last = min(first + NUM_STEPS, len(steps.start)) - 1
    return [tidy(steps.start[first]), tidy(steps.start[last] + steps.seconds[last])]


def _steps(outcome: RunOutcome, window: list[float]) -> dict[str, Any]:
    steps = outcome.steps
    first, end = np.searchsorted(np.frombuffer(steps.start), window)
    shown = slice(int(first), min(int(end), int(first) + MAX_STEPS))
    return {
        "window": window,
        "start": [tidy(t) for t in steps.start[shown]],
        "seconds": [tidy(t) for t in steps.seconds[shown]],
        "prefill_tokens": list(steps.num_prefill_tokens[shown]),
        "decodes": list(steps.num_decodes[shown]),
    }


def request_rows(outcome: RunOutcome, workload: Workload, run: RunMeasures) -> list[dict[str, Any]]:
    """Return a row for each request of a run, in the order of the workload: times in seconds since
    the start of the run, and durations in seconds. What a request does not have is None.
    """
    rows = []
    for i, (request, result) in enumerate(zip(workload.requests, outcome.requests, strict=True)):
        measured = {name: float(getattr(run, name)[i]) for name in (*PER_REQUEST, "gap")}
        durations = {n: None if np.isnan(v) else tidy(v) for n, v in measured.items()}
        rows.append(
            {
                "seed": workload.seed,
                "request": i,
                "user": request.user,
                "class": request.kind,
                "program": request.program if request.program >= 0 else None,
                "prompt_tokens": request.num_prompt_tokens,
                "output_tokens": request.output_tokens,
                "cached_tokens": result.num_cached_tokens,
                "received_tokens": len(result.token_times),
                "arrival": result.arrival,
                "admitted": result.admitted,
                "end": result.end,
                **durations,
                "finish_reason": result.finish_reason,
                "is_good": None if np.isnan(run.is_good[i]) else bool(run.is_good[i]),
            }
        )
    return rows


# What a server measured while a decision log was written, beside what is simulated of it.


def measure_recorded(traffic: "Traffic") -> dict[str, Any]:
    """Return the durations of a log's requests, in the shape of a result of `compare`: in seconds,
    with the policies that decided, in words.
    """
    lives = traffic.lives
    times = [np.frombuffer(life.token_times) for life in lives]
    pairs = list(zip(lives, times, strict=True))
    finished = [pair for pair in pairs if pair[0].finish_reason in ("stop", "length")]
    return {
        "policies": traffic.chronicle.policies,
        "requests": len(lives),
        "finished": len(finished),
        "durations": {
            "ttft": _statistics([t[0] - life.arrival for life, t in pairs if len(t)]),
            "tpot": _statistics([(t[-1] - t[0]) / (len(t) - 1) for t in times if len(t) > 1]),
            "gap": over_seeds([np.concatenate([np.empty(0), *map(np.diff, times)])]),
            "e2e": _statistics([(life.end or 0.0) - life.arrival for life, _ in finished]),
        },
        "totals": {},
    }


def _statistics(values: list[float]) -> dict[str, float]:
    return over_seeds([np.array(values, dtype=float)])


# Requests by client and by class of client: how each group fared, and what it was served. Which
# groups are worth a line is decided here; how a line looks is not.


MAX_LISTED = 5  # groups of a kind that get a line, and intervals

Places = npt.NDArray[np.int64]  # of requests in their workload
# By "client" and by "class", then by name: the places in each workload.
Groups = dict[str, dict[str, list[Places]]]


def group_requests(workloads: Sequence[Workload]) -> Groups:
    """Groups of which there are several; classes only if they are not the clients themselves."""
    found: Groups = {}
    for kind, names in (
        ("client", [[r.user for r in workload.requests] for workload in workloads]),
        ("class", [[r.kind for r in workload.requests] for workload in workloads]),
    ):
        groups: dict[str, list[list[int]]] = defaultdict(lambda: [[] for _ in workloads])
        for number, of_workload in enumerate(names):
            for place, name in enumerate(of_workload):
                groups[name][number].append(place)
        as_arrays = {
            name: [np.array(places, dtype=np.int64) for places in groups[name]]
            for name in sorted(groups)
        }
        same = "client" in found and _partition(as_arrays) == _partition(found["client"])
        if len(groups) > 1 and not same:
            found[kind] = as_arrays
    return found


def _partition(groups: dict[str, list[Places]]) -> set[tuple[bytes, ...]]:
    return {tuple(places.tobytes() for places in of_seeds) for of_seeds in groups.values()}


def summarize_groups(groups: Groups, runs: list[RunMeasures]) -> dict[str, Any]:
    """Per group its durations, in seconds, as means over seeds; per client what it was served."""
    found: dict[str, Any] = {}
    for kind, by_name in groups.items():
        found[kind] = {}
        for name, places in by_name.items():
            durations = {
                measure: [getattr(run, measure)[p] for run, p in zip(runs, places, strict=True)]
                for measure in PER_REQUEST
            }
            found[kind][name] = {
                "requests": sum(map(len, places)),
                "unfinished": sum(int(np.isnan(values).sum()) for values in durations["e2e"]),
                "durations": {m: over_seeds(seeds) for m, seeds in durations.items()},
                **good_of(runs, places),
            }
    for name, group in found.get("client", {}).items():
        group["service"] = _service_of(name, runs)
    return found


def good_of(runs: list[RunMeasures], places: list[Places]) -> dict[str, float]:
    """Goodput and the share within the SLO, where one holds for some request of the group."""
    good = np.concatenate([run.is_good[p] for run, p in zip(runs, places, strict=True)])
    found = good_totals(good, [""] * len(good), sum(run.totals["seconds"] for run in runs))
    return {name: tidy(value) for name, value in found.items()}


def worst_class(classes: dict[str, dict[str, Any]]) -> str | None:
    """Return the class of which the least share is within its SLO, if several have one: of its
    requests, or of its programs where only these have limits.
    """
    shares = {
        name: group.get("good_share", group.get("programs_in_time"))
        for name, group in classes.items()
    }
    shares = {name: share for name, share in shares.items() if share is not None}
    return min(shares, key=lambda name: (shares[name], name)) if len(shares) > 1 else None


def _service_of(client: str, runs: list[RunMeasures]) -> dict[str, float | None]:
    """Totals over the seeds; shares are of what was served while clients competed."""
    own = [run.service[client] for run in runs if client in run.service]
    contested = sum(service.got for run in runs for service in run.service.values())
    return {
        "weight": runs[0].weights.get(client, 1.0),
        "tokens": sum(service.tokens for service in own),
        "tokens_per_second": tidy(
            sum(s.tokens for s in own) / max(sum(s.seconds for s in own), 1e-9)
        ),
        "competing_seconds": tidy(sum(service.competing for service in own)),
        "share": tidy(sum(s.got for s in own) / contested) if contested else None,
        "due_share": tidy(sum(s.due for s in own) / contested) if contested else None,
        "behind": tidy(max((s.behind for s in own), default=0.0)),
    }


def list_groups(summaries: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names worth a line: the groups that waited longest for a first token in any
    run.
    """

    def worst(kind: str, name: str) -> float:
        waits = [summary[kind][name]["durations"]["ttft"]["p99"] for summary in summaries]
        return max(float("inf") if np.isnan(wait) else wait for wait in waits)

    return {
        kind: sorted(by_name, key=lambda name: (-worst(kind, name), name))[:MAX_LISTED]
        for kind, by_name in summaries[0].items()
    }


def compare_groups(
    groups: Groups,
    listed: dict[str, list[str]],
    first: list[RunMeasures],
    second: list[RunMeasures],
    sampling: Sampling,
) -> dict[str, dict[str, dict[str, dict[str, Difference]]]]:
    """Second minus first of the listed groups: by kind, name, measure and statistic. The intervals
    of a measure hold for all groups of a kind together: of many, some would differ by chance.
    """

    def alone(runs: list[RunMeasures], measure: str, places: list[Places]) -> list[Floats]:
        return [_only(getattr(run, measure), p) for run, p in zip(runs, places, strict=True)]

    has_slo = any("good_share" in run.totals for run in (*first, *second))
    measures = (*PER_REQUEST, *(["is_good"] if has_slo else []))
    samplings = {kind: sampling.for_many(len(groups[kind])) for kind in listed}
    return {
        kind: {
            name: {
                measure: compare_requests(
                    alone(first, measure, groups[kind][name]),
                    alone(second, measure, groups[kind][name]),
                    samplings[kind],
                )
                for measure in measures
            }
            for name in names
        }
        for kind, names in listed.items()
    }


def _only(values: Floats, places: Places) -> Floats:
    """Return the values at these places, NaN elsewhere."""
    kept = np.full(len(values), np.nan)
    kept[places] = values[places]
    return kept


# The document: every configuration on every seed, in rounds.


NUM_VICTIMS = 5
Document = dict[str, Any]


def compare(
    candidates: list[Candidate],
    workloads: list[Workload],
    *,
    slo: Sequence[StatedSlo] = (),
    reader: Reader | None = None,
    is_live: bool = False,
    clip: bool = False,
    num_jobs: int = 1,
    progress: Progress = lambda count: None,
    price_per_hour: float | None = None,
    has_requests: bool = False,
) -> Document:
    """Run all candidates on all workloads (one per seed); the first is what the others are
    compared with. The same input gives the same document, byte for byte, unless `is_live`.
    Simulated runs are spread over `num_jobs` processes. `slo` are the limits that the command
    states, beside those of the workload; with a `reader` the quality of experience is measured.
    `price_per_hour` is of an engine alone; a fleet states its own. With `has_requests` each result
    has a row for each request. Raises `ConfigError` for a class that the workload does not have.
    """
    levels = ServiceLevels.of(slo, classes_of(workloads))
    candidates, workloads, notes = prepare(candidates, workloads, is_live=is_live, clip=clip)
    # in rounds: what changes on the machine meanwhile hits all alike
    runs = [(c.config, workload, c.fleet) for workload in workloads for c in candidates]
    outcomes = simulate_all(runs, num_jobs, progress)
    if is_live:
        outcomes = (run_live(config, workload, progress) for config, workload, _ in runs)
    alone: Iterator[RunOutcome | None] = repeat(None)
    if not is_live and any(r.program >= 0 for r in workloads[0].requests):
        programs = [(config, one_by_one(workload), None) for config, workload, _ in runs]
        alone = simulate_all(programs, num_jobs, lambda count: None)
    weights, stated_by = stated_weights(candidates, workloads[0])
    watts = [None if is_live else watts_of(candidate) for candidate in candidates]
    measures: list[list[RunMeasures]] = [[] for _ in candidates]
    curves: list[dict[str, Any]] = [{} for _ in candidates]
    rows: list[list[dict[str, Any]]] = [[] for _ in candidates]
    for number, (outcome, (_, workload, fleet)) in enumerate(zip(outcomes, runs, strict=True)):
        i = number % len(candidates)
        run = RunMeasures(
            outcome, workload, levels, weights[i] if stated_by else None, reader, next(alone)
        )
        if fleet is not None:
            run.totals |= fleet_totals(cast("FleetOutcome", outcome), fleet, run.totals)
        _add_costs(run, outcome, fleet, watts[i], price_per_hour)
        measures[i].append(run)
        if has_requests:
            rows[i] += request_rows(outcome, workload, run)
        if not curves[i]:
            window = curves[0]["steps"]["window"] if i else None  # one stretch of time for all
            curves[i] = timelines(outcome, workload, window)
    groups = group_requests(workloads)
    results = [
        {
            "name": candidate.name,
            "policy": candidate.config.scheduler.policy,
            "settings": msgspec.to_builtins(candidate.config),
            "fleet": msgspec.to_builtins(candidate.fleet),
            "weights": weights[i],
            **summarize(measures[i]),
            "slo": _by_class(workloads, measures[i]),
            "service_bound": None if is_live else _service_bound(candidate, workloads),
            "groups": summarize_groups(groups, measures[i]),
            "distributions": distributions(measures[i]),
            "timelines": curves[i],
            **({"requests": rows[i]} if has_requests else {}),
        }
        for i, candidate in enumerate(candidates)
    ]
    listed = list_groups([result["groups"] for result in results])
    first = candidates[0]
    for i, candidate in enumerate(candidates[1:], start=1):
        sampling = sampling_of(measures[0], measures[i], is_live=is_live)
        results[i]["against_first"] = {
            "other_differences": other_differences(first.config, candidate.config),
            "differences": differences(measures[0], measures[i], sampling),
            "groups": _as_data(compare_groups(groups, listed, measures[0], measures[i], sampling)),
            "paired": _paired(measures[0], measures[i]),
            "victims": _victims(workloads, measures[0], measures[i]),
        }
    return {
        "mode": "live" if is_live else "simulated",
        "workload": _describe(workloads),
        "slo": None if levels is None else msgspec.to_builtins(levels) | {"words": str(levels)},
        "reader": msgspec.to_builtins(reader),
        "notes": notes,
        "machines": [] if is_live else machines(candidates),
        "weights_stated_by": stated_by,
        "listed_groups": listed,
        "results": results,
    }


def _add_costs(
    run: RunMeasures,
    outcome: RunOutcome,
    fleet: "Fleet | None",
    watts: Sequence[tuple[float, float]] | None,
    price_per_hour: float | None,
) -> None:
    """Add prices to the totals of a run where the price of its engine is stated, and joules where
    it is known how many watts each replica draws.
    """
    if fleet is None and price_per_hour is not None:
        run.totals |= price_totals(price_per_hour, run.totals)
    if watts is not None:
        run.totals |= energy_totals(watts, *_seconds_of_replicas(outcome, fleet), outcome)


def _seconds_of_replicas(
    outcome: RunOutcome, fleet: "Fleet | None"
) -> tuple[list[float], list[float]]:
    """Return for how many seconds each replica has computed, and how many are paid for."""
    if fleet is None:
        return [sum(outcome.steps.seconds)], [outcome.end]
    of_fleet = cast("FleetOutcome", outcome)
    return of_fleet.busy_seconds, of_fleet.paid_seconds


def summarize(runs: list[RunMeasures]) -> dict[str, Any]:
    """Means over the seeds of what was measured in each: statistics of durations, in seconds, and
    totals.
    """
    statistics = {n: over_seeds([getattr(run, n) for run in runs]) for n in runs[0].measured}
    statistics["gap"] = over_seeds([run.gaps.astype(float) for run in runs])
    names = [name for name in runs[0].totals if all(name in run.totals for run in runs)]
    totals = {name: [run.totals[name] for run in runs] for name in names}
    reasons = sorted({reason for run in runs for reason in run.finish_reasons})
    return {
        "durations": statistics,
        "totals": {name: tidy(float(np.mean(values))) for name, values in totals.items()},
        "totals_by_seed": {name: [tidy(v) for v in values] for name, values in totals.items()},
        "finish_reasons": {r: sum(run.finish_reasons.get(r, 0) for run in runs) for r in reasons},
    }


def sampling_of(first: list[RunMeasures], second: list[RunMeasures], *, is_live: bool) -> Sampling:
    """Several seeds give intervals as they are. One gives them by what is drawn from it, but not
    live: the machine is another one in every round, and only rounds tell by how much.
    """
    if len(first) > 1:
        return sample_seeds([run.block for run in first])
    if is_live:
        return Sampling()
    a, b = ([getattr(runs[0], name) for name in PER_REQUEST] for runs in (first, second))
    apart = [y - x for x, y in zip(a, b, strict=True)]
    return sample_one(first[0].block, [*a, *b, *apart])


def differences(
    first: list[RunMeasures], second: list[RunMeasures], sampling: Sampling
) -> dict[str, Any]:
    """Second minus first, by measure and statistic, each with its interval."""
    found: dict[str, Any] = {
        name: compare_requests(
            [getattr(run, name) for run in first],
            [getattr(run, name) for run in second],
            sampling,
        )
        for name in first[0].measured
    }
    found["gap"] = compare_gaps(first, second, sampling)
    found["totals"] = {
        name: compare_seeds(
            [run.totals[name] for run in first], [run.totals[name] for run in second], sampling
        )
        for name in first[0].totals
        if all(name in run.totals for run in (*first, *second))  # not all have drafts
    }
    # These have one value per request, so blocks of one seed are enough for an interval.
    for name, measure, statistic in (
        ("good_share", "is_good", "mean"),
        ("quality", "quality", "mean"),
        ("programs_in_time", "program_good", "mean"),
    ):
        if name in found["totals"]:
            values = [[getattr(run, measure) for run in runs] for runs in (first, second)]
            found["totals"][name] = compare_requests(values[0], values[1], sampling)[statistic]
    return dict(_as_data(found))


def _as_data(found: Any) -> Any:
    """Differences at any depth of dictionaries as plain data."""
    if isinstance(found, dict):
        return {name: _as_data(value) for name, value in found.items()}
    assert isinstance(found, Difference)
    return {
        "value": tidy(found.value),
        "low": None if found.low is None else tidy(found.low),
        "high": None if found.high is None else tidy(found.high),
        "low_ratio": None if found.low_ratio is None else tidy(found.low_ratio),
        "high_ratio": None if found.high_ratio is None else tidy(found.high_ratio),
        "is_distinguishable": found.is_distinguishable,
        "is_nothing": found.is_nothing,
    }


def _paired(first: list[RunMeasures], second: list[RunMeasures]) -> dict[str, Any]:
    """Request by request: how many are faster, how many slower, by more than 1%."""
    found = {}
    for name in PER_REQUEST:
        a = np.concatenate([getattr(run, name) for run in first])
        b = np.concatenate([getattr(run, name) for run in second])
        both = ~np.isnan(a) & ~np.isnan(b)
        found[name] = {
            "pairs": int(both.sum()),
            "faster": int((b[both] < 0.99 * a[both]).sum()),
            "slower": int((b[both] > 1.01 * a[both]).sum()),
            "only_first": int((~np.isnan(a) & np.isnan(b)).sum()),
            "only_second": int((np.isnan(a) & ~np.isnan(b)).sum()),
        }
    return found


def _victims(
    workloads: list[Workload], first: list[RunMeasures], second: list[RunMeasures]
) -> list[dict[str, Any]]:
    """Return the requests whose end-to-end time grew by the largest factor."""
    found = []
    for workload, a, b in zip(workloads, first, second, strict=True):
        ratio = np.nan_to_num(b.e2e / a.e2e, nan=0.0)
        for i in np.argsort(-ratio, kind="stable")[:NUM_VICTIMS]:
            request = workload.requests[i]
            found.append(
                {
                    "seed": workload.seed,
                    "request": int(i),
                    "user": request.user,
                    "prompt_tokens": request.num_prompt_tokens,
                    "output_tokens": request.output_tokens,
                    "e2e_first": tidy(float(a.e2e[i])),
                    "e2e": tidy(float(b.e2e[i])),
                    "slowdown": tidy(float(ratio[i])),
                }
            )
    found.sort(key=lambda victim: -victim["slowdown"])
    return [victim for victim in found[:NUM_VICTIMS] if victim["slowdown"] > 1]


def _describe(workloads: list[Workload]) -> dict[str, Any]:
    first = workloads[0]
    return {
        "name": first.name,
        "is_recorded": first.is_trace,
        "seeds": [workload.seed for workload in workloads],
        "requests": len(first.requests),
        "seconds": tidy(first.duration),
        "clients": first.num_clients,
        "prompt_tokens": sum(r.num_prompt_tokens for r in first.requests),
        "output_tokens": sum(r.output_tokens for r in first.requests),
        "max_tokens": _allowed(workloads),
        "programs": len(programs_of(first)),
        "aborted_programs": sum(aborts(first, program) for program in programs_of(first)),
    }


def _allowed(workloads: list[Workload]) -> list[int]:
    """Return the least and the most that clients allow for a reply, in tokens, by a server with
    room.
    """
    allowed = [limit for workload in workloads for limit in workload.max_tokens(room=2**62)]
    return [min(allowed), max(allowed)]


def classes_of(workloads: Sequence[Workload]) -> dict[str, Slo | None]:
    """Classes of clients of any seed, each with the limits that the workload states for it."""
    return {kind: slo for workload in workloads for kind, slo in workload.all_classes.items()}


def _by_class(workloads: list[Workload], runs: list[RunMeasures]) -> dict[str, Any]:
    """Return requests, goodput and share within the SLO by class, over all seeds; and the worst
    class.
    """
    places = [
        {
            kind: np.flatnonzero(np.array([r.kind for r in workload.requests]) == kind)
            for kind in workload.all_classes
        }
        for workload in workloads
    ]
    found = {}
    for kind in sorted({kind for of_seed in places for kind in of_seed}):
        own = [of_seed.get(kind, np.empty(0, dtype=np.int64)) for of_seed in places]
        found[kind] = {"requests": sum(map(len, own)), **good_of(runs, own)}
        if any("programs_in_time" in run.totals for run in runs):
            good = [run.program_good[p] for run, p in zip(runs, own, strict=True)]
            if not np.isnan(np.concatenate(good)).all():
                found[kind]["programs_in_time"] = tidy(float(np.nanmean(np.concatenate(good))))
    return {"by_class": found, "worst_class": worst_class(found)}


def _service_bound(candidate: Candidate, workloads: list[Workload]) -> float | None:
    """Return the bound that VTC promises with the KV cache of one engine."""
    if candidate.fleet is not None:
        return None
    config = candidate.config
    num_blocks = SimulatedRunner(config, ModelInfo(config.model)).info.num_kv_blocks
    prompts = (r.num_prompt_tokens for workload in workloads for r in workload.requests)
    return service_bound(max(prompts, default=0), num_blocks * config.cache.block_size)


def encode(document: Document) -> bytes:
    """Return one JSON document; what is undefined is null."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1)


# Runs of configurations, and how two differ in one measure: what a curve or a search needs.


class Apart(msgspec.Struct, frozen=True):
    """The distance of a value from another one, in the unit of its row, with the 95% interval;
    None: it has none.
    """

    value: float
    low: float | None
    high: float | None
    verdict: str  # `better`, `worse`, or why it is neither

    def in_words(self, row: Row) -> str:
        """Return the difference and its interval, with the digits of the row."""
        if self.low is None or self.high is None:
            return signed(self.value, row)
        return f"{signed(self.value, row)} ({span(self.low, self.high, row)})"


def apart(difference: Difference, row: Row, first: float) -> Apart:
    """Return a difference from the value `first`, which is in the unit of the row."""
    low, high = (
        None if end is None else end * row.factor for end in (difference.low, difference.high)
    )
    said = {
        **msgspec.to_builtins(difference),
        "is_distinguishable": difference.is_distinguishable,
        "is_nothing": difference.is_nothing,
    }
    return Apart(difference.value * row.factor, low, high, verdict(said, row, first))


def measure_groups(
    groups: Sequence[Sequence[tuple[EngineConfig, Workload]]],
    slo: ServiceLevels | None,
    num_jobs: int,
    progress: Progress,
    price_per_hour: float | None = None,
) -> list[list[RunMeasures]]:
    """Simulate each configuration on its workload; the measures, in the same groups, with joules on
    a machine whose watts are known, and with prices where an hour of it has one.
    """
    runs = [(config, workload, None) for group in groups for config, workload in group]
    outcomes = simulate_all(runs, num_jobs, progress)
    measured = []
    watts: dict[int, list[tuple[float, float]] | None] = {}  # by the identity of a configuration
    for outcome, (config, workload, _) in zip(outcomes, runs, strict=True):
        run = RunMeasures(outcome, workload, slo, workload.weights or None)
        if id(config) not in watts:
            watts[id(config)] = watts_of(Candidate("", config))
        _add_costs(run, outcome, None, watts[id(config)], price_per_hour)
        measured.append(run)
    left = iter(measured)
    return [[next(left) for _ in group] for group in groups]


def mean_of(runs: Sequence[RunMeasures], row: Row) -> float:
    """Return the mean over seeds, in the unit of the row. Raises `ConfigError` where it is
    undefined.
    """
    value = value_of(summarize(list(runs)), row)
    if value != value:  # NaN
        raise ConfigError(
            f"{key(row)} is not defined on this workload: no request has a value of it. Energy "
            "needs the watts of the machine, and prices need the price of an hour of it"
        )
    return value


def apart_in(first: Sequence[RunMeasures], second: Sequence[RunMeasures], row: Row) -> Apart:
    """Return the second less the first in one measure; the runs are of the same seeds, in pairs."""
    a, b = list(first), list(second)
    found = differences(a, b, sampling_of(a, b, is_live=False))[row.measure][row.statistic]
    ends = {name: found[name] for name in ("value", "low", "high", "low_ratio", "high_ratio")}
    return apart(Difference(**ends), row, mean_of(first, row))
