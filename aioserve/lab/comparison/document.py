"""The same requests under several configurations: which is better, by how much, and is it sure?

Runs every configuration on every seed, in rounds, and puts all numbers into one document of plain
data. Knows nothing about how it is shown.
"""

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np

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
    other_differences,
    prepare,
    stated_weights,
)
from aioserve.lab.comparison.fleet_totals import fleet_totals
from aioserve.lab.comparison.groups import (
    compare_groups,
    good_of,
    group_requests,
    list_groups,
    summarize_groups,
    worst_class,
)
from aioserve.lab.comparison.measures import PER_REQUEST, RunMeasures, over_seeds, tidy
from aioserve.lab.comparison.programs import aborts, one_by_one, programs_of
from aioserve.lab.comparison.quality import Reader
from aioserve.lab.comparison.service import service_bound
from aioserve.lab.comparison.timeline import distributions, timelines
from aioserve.lab.simulation.clients import Progress
from aioserve.lab.simulation.fleet_outcome import FleetOutcome
from aioserve.lab.simulation.outcome import RunOutcome
from aioserve.lab.simulation.parallel import simulate_all
from aioserve.lab.simulation.run import run_live
from aioserve.lab.slo import ServiceLevels, Slo, StatedSlo
from aioserve.lab.workloads.workload import Workload
from aioserve.model_info import ModelInfo
from aioserve.runner.simulation.simulated import SimulatedRunner

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
) -> Document:
    """Run all candidates on all workloads (one per seed); the first is what the others are
    compared with. The same input gives the same document, byte for byte, unless `is_live`.
    Simulated runs are spread over `num_jobs` processes. `slo` are the limits that the command
    states, beside those of the workload; with a `reader` the quality of experience is measured.
    Raises `ConfigError` for a class that the workload does not have.
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
    measures: list[list[RunMeasures]] = [[] for _ in candidates]
    curves: list[dict[str, Any]] = [{} for _ in candidates]
    for number, (outcome, (_, workload, fleet)) in enumerate(zip(outcomes, runs, strict=True)):
        i = number % len(candidates)
        run = RunMeasures(
            outcome, workload, levels, weights[i] if stated_by else None, reader, next(alone)
        )
        if fleet is not None and isinstance(outcome, FleetOutcome):
            run.totals |= fleet_totals(outcome, fleet, run.totals)
        measures[i].append(run)
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
        "weights_stated_by": stated_by,
        "listed_groups": listed,
        "results": results,
    }


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
    """The requests whose end-to-end time grew by the largest factor."""
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
    """The least and the most that clients allow for a reply, in tokens, by a server with room."""
    allowed = [limit for workload in workloads for limit in workload.max_tokens(room=2**62)]
    return [min(allowed), max(allowed)]


def classes_of(workloads: Sequence[Workload]) -> dict[str, Slo | None]:
    """Classes of clients of any seed, each with the limits that the workload states for it."""
    return {kind: slo for workload in workloads for kind, slo in workload.all_classes.items()}


def _by_class(workloads: list[Workload], runs: list[RunMeasures]) -> dict[str, Any]:
    """Requests, goodput and share within the SLO by class, over all seeds; and the worst class."""
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
    """The bound that VTC promises with the KV cache of one engine."""
    if candidate.fleet is not None:
        return None
    config = candidate.config
    num_blocks = SimulatedRunner(config, ModelInfo(config.model)).info.num_kv_blocks
    prompts = (r.num_prompt_tokens for workload in workloads for r in workload.requests)
    return service_bound(max(prompts, default=0), num_blocks * config.cache.block_size)


def encode(document: Document) -> bytes:
    """One JSON document; what is undefined is null."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1)
