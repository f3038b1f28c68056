"""Requests by client and by class of client: how each group fared, and what it was served.

Knows workloads and measures of runs. Which groups are worth a line is decided here; how a line
looks is not.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.lab.comparison.bootstrap import Difference, Sampling, compare_requests
from aioserve.lab.comparison.measures import (
    PER_REQUEST,
    RunMeasures,
    good_totals,
    over_seeds,
    tidy,
)
from aioserve.lab.comparison.service import Floats
from aioserve.lab.workloads.workload import Workload

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
        group["service"] = _service(name, runs)
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


def _service(client: str, runs: list[RunMeasures]) -> dict[str, float | None]:
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
