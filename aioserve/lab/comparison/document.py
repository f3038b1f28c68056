"""The same requests under several configurations: who is better, by how much, and is it sure?

Runs every configuration on every seed, in rounds, and puts all numbers into one document of plain
data. Knows nothing about how it is shown.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from aioserve.config import EngineConfig
from aioserve.lab.comparison.bootstrap import (
    Difference,
    Sampling,
    compare_gaps,
    compare_requests,
    compare_totals,
    sample,
)
from aioserve.lab.comparison.groups import (
    compare_groups,
    group_requests,
    list_groups,
    summarize_groups,
)
from aioserve.lab.comparison.measures import PER_REQUEST, RunMeasures, Slo, statistics_of, tidy
from aioserve.lab.comparison.timeline import distributions, timelines
from aioserve.lab.simulation.parallel import simulate_all
from aioserve.lab.simulation.run import Progress, check_fits, run_live, simulated
from aioserve.lab.workloads.workload import Workload
from aioserve.model_info import ModelInfo
from aioserve.scheduler import available_policies
from aioserve.shipped import config_names

NUM_VICTIMS = 5
# They change who is served and where, and what is noted, not how requests are scheduled.
IGNORED_SECTIONS = ("server", "shadow")
IGNORED_SETTINGS = ("scheduler.policy", "scheduler.decision_log", "scheduler.request_log")
# Options of policies that say what clients are due: a number each.
WEIGHT_OPTIONS = ("weights", "tickets")

Document = dict[str, Any]


class Candidate(msgspec.Struct, frozen=True):
    """A configuration that takes part, under a short name."""

    name: str
    config: EngineConfig


def load_candidates(
    paths: Sequence[str], overrides: Sequence[tuple[str, Any]] = ()
) -> list[Candidate]:
    """Named after their files; `overrides` are laid over all. Raises `ConfigError`.

    A policy stands for the default settings with it: `file.py`, `file.py:Class`, `module:Class`, or
    the name of one that was installed and has no configuration of its own.
    """
    stems = [path.rpartition(":")[2] if ":" in path else Path(path).stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else list(paths)
    names = [
        name if names.index(name) == i else f"{name} ({names[: i + 1].count(name)})"
        for i, name in enumerate(names)
    ]
    return [
        Candidate(name, _load(path, overrides)) for name, path in zip(names, paths, strict=True)
    ]


def _load(path: str, overrides: Sequence[tuple[str, Any]]) -> EngineConfig:
    is_policy = ":" in path or path.endswith(".py")
    if is_policy or (path in available_policies() and path not in config_names()):
        return EngineConfig.load(None, [("scheduler.policy", path), *overrides])
    return EngineConfig.load(path, overrides)


def other_differences(first: EngineConfig, second: EngineConfig) -> list[str]:
    """Settings in which two configurations differ besides the policy and its options."""
    a, b = _flat(msgspec.to_builtins(first)), _flat(msgspec.to_builtins(second))
    return [
        f"{name} ({a.get(name)} against {b.get(name)})"
        for name in sorted(a | b)
        if a.get(name) != b.get(name)
        and name.split(".")[0] not in IGNORED_SECTIONS
        and name not in IGNORED_SETTINGS
        and not name.startswith("scheduler.options")
    ]


def prepare(
    candidates: list[Candidate], workloads: list[Workload], *, is_live: bool, clip: bool
) -> tuple[list[Candidate], list[Workload], list[str]]:
    """Candidates and workloads that fit each other, and what had to be done for that.

    Raises `ConfigError` if a request can never run under some candidate.
    """
    notes = []
    if clip:
        limit = min(ModelInfo(c.config.model).max_model_len for c in candidates)
        clipped = [workload.clipped(limit) for workload in workloads]
        workloads = [workload for workload, _ in clipped]
        if num := sum(count for _, count in clipped):
            notes.append(f"{num} requests were shortened to {limit} tokens.")
    if not is_live:
        longest = max(workload.longest for workload in workloads)
        raised = [Candidate(c.name, simulated(c.config, longest)) for c in candidates]
        if raised != [Candidate(c.name, simulated(c.config)) for c in candidates]:
            notes.append(
                f"max_model_len is {longest}, the longest request: the configurations leave it "
                "open, and what is simulated has no positions."
            )
        candidates = raised
        for candidate in candidates:
            for workload in workloads:
                check_fits(candidate.config, workload)
    return candidates, workloads, notes


def stated_weights(
    candidates: Sequence[Candidate], workload: Workload
) -> tuple[list[dict[str, float]], str]:
    """What clients are due under each candidate, and who says so ("" if nobody does).

    The workload has the first word. Otherwise what one configuration states holds for those that
    state nothing, unless several state different things: then each is measured by its own.
    """
    if workload.weights:
        return [workload.weights] * len(candidates), "the workload"
    own = []
    for candidate in candidates:
        options = candidate.config.scheduler.options
        stated = [options[name] for name in WEIGHT_OPTIONS if isinstance(options.get(name), dict)]
        own.append(
            {
                str(client): float(weight)
                for weights in stated
                for client, weight in weights.items()
                if isinstance(weight, int | float) and weight > 0
            }
        )
    different = [weights for i, weights in enumerate(own) if weights and weights not in own[:i]]
    if len(different) == 1:
        owner = candidates[own.index(different[0])].name
        return different * len(candidates), f"configuration {owner}"
    return own, "each configuration" if different else ""


def compare(
    candidates: list[Candidate],
    workloads: list[Workload],
    *,
    slo: Slo | None = None,
    is_live: bool = False,
    clip: bool = False,
    num_jobs: int = 1,
    progress: Progress = lambda count: None,
) -> Document:
    """Run all candidates on all workloads (one per seed); the first is what the others are
    compared with. The same input gives the same document, byte for byte, unless `is_live`.
    Simulated runs are spread over `num_jobs` processes.
    """
    candidates, workloads, notes = prepare(candidates, workloads, is_live=is_live, clip=clip)
    # in rounds: what changes on the machine meanwhile hits all alike
    runs = [(candidate.config, workload) for workload in workloads for candidate in candidates]
    outcomes = simulate_all(runs, num_jobs, progress)
    if is_live:
        outcomes = (run_live(config, workload, progress) for config, workload in runs)
    weights, stated_by = stated_weights(candidates, workloads[0])
    measures: list[list[RunMeasures]] = [[] for _ in candidates]
    curves: list[dict[str, Any]] = [{} for _ in candidates]
    for number, (outcome, (_, workload)) in enumerate(zip(outcomes, runs, strict=True)):
        i = number % len(candidates)
        measures[i].append(RunMeasures(outcome, workload, slo, weights[i] if stated_by else None))
        if not curves[i]:
            window = curves[0]["steps"]["window"] if i else None  # one stretch of time for all
            curves[i] = timelines(outcome, workload, window)
    groups = group_requests(workloads)
    results = [
        {
            "name": candidate.name,
            "policy": candidate.config.scheduler.policy,
            "settings": msgspec.to_builtins(candidate.config),
            "weights": weights[i],
            **summarize(measures[i]),
            "groups": summarize_groups(groups, measures[i]),
            "distributions": distributions(measures[i]),
            "timelines": curves[i],
        }
        for i, candidate in enumerate(candidates)
    ]
    listed = list_groups([result["groups"] for result in results])
    sampling = sample([run.block for run in measures[0]], is_live=is_live)
    first = candidates[0]
    for i, candidate in enumerate(candidates[1:], start=1):
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
        "slo": None if slo is None else msgspec.to_builtins(slo),
        "notes": notes,
        "weights_stated_by": stated_by,
        "listed_groups": listed,
        "results": results,
    }


def summarize(runs: list[RunMeasures]) -> dict[str, Any]:
    """Durations over the requests of all seeds, in seconds; totals as means over the seeds."""
    statistics: dict[str, dict[str, float]] = {}
    for name in PER_REQUEST:
        values = np.concatenate([getattr(run, name) for run in runs])
        statistics[name] = statistics_of(values)
    statistics["gap"] = statistics_of(np.concatenate([run.gaps for run in runs]).astype(float))
    totals = {name: [run.totals[name] for run in runs] for name in runs[0].totals}
    reasons = sorted({reason for run in runs for reason in run.finish_reasons})
    return {
        "durations": statistics,
        "totals": {name: tidy(float(np.mean(values))) for name, values in totals.items()},
        "totals_by_seed": {name: [tidy(v) for v in values] for name, values in totals.items()},
        "finish_reasons": {r: sum(run.finish_reasons.get(r, 0) for run in runs) for r in reasons},
    }


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
        for name in PER_REQUEST
    }
    found["gap"] = compare_gaps(first, second, sampling)
    good = [[run.is_good for run in runs] for runs in (first, second)]
    found["totals"] = {
        name: compare_totals(
            [run.totals[name] for run in first], [run.totals[name] for run in second]
        )
        for name in first[0].totals
    }
    # It has one value per request, so blocks of one seed are enough for an interval.
    found["totals"]["good_share"] = compare_requests(good[0], good[1], sampling)["mean"]
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
                    "output_tokens": request.max_tokens,
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
        "is_recorded": first.is_recorded,
        "seeds": [workload.seed for workload in workloads],
        "requests": len(first.requests),
        "seconds": tidy(first.duration),
        "clients": first.num_clients,
        "prompt_tokens": sum(r.num_prompt_tokens for r in first.requests),
        "output_tokens": sum(r.max_tokens for r in first.requests),
    }


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def encode(document: Document) -> bytes:
    """One JSON document; what is undefined is null."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1)
