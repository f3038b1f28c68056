"""From what happened in a run to the numbers by which runs are compared.

Knows one run at a time. All durations are in seconds; what is undefined is NaN, never 0: a request
without a first token has no time to it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aioserve.lab.comparison.programs import completion_times, in_time, slowdowns
from aioserve.lab.comparison.quality import Reader
from aioserve.lab.comparison.service import Floats, service_by_client
from aioserve.lab.simulation.outcome import RequestOutcome, RunOutcome
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.workloads.workload import Workload

Ints = npt.NDArray[np.int64]

# Gaps between tokens are too many to keep: counted in bins 1% apart, from 10 microseconds up.
GAP_EDGES = 1e-5 * 1.01 ** np.arange(1900)
MAX_BLOCKS = 50  # of consecutive requests, for the bootstrap
REQUESTS_PER_BLOCK = 20

PER_REQUEST = ("ttft", "tpot", "e2e")
PER_PROGRAM = ("program", "slowdown")  # at the places of the programs' first requests
STATISTICS = ("mean", "p50", "p90", "p99", "max")


class RunMeasures:
    """One run in arrays, one entry per request of the workload, and totals."""

    def __init__(
        self,
        outcome: RunOutcome,
        workload: Workload,
        slo: ServiceLevels | None,
        weights: Mapping[str, float] | None = None,
        reader: Reader | None = None,
        alone: RunOutcome | None = None,
    ) -> None:
        """`weights` say what clients are due beside each other, each 1 if it is not stated. With a
        `reader` the quality of experience is measured; `alone` is the outcome of the programs
        `one_by_one`, without which they have no slowdown.
        """
        requests = outcome.requests
        self.weights = weights or {}
        self.service, difference = service_by_client(outcome, workload, self.weights)
        self.ttft = np.array([r.ttft for r in requests])
        self.tpot = np.array([_per_output_token(r) for r in requests])
        self.e2e = np.array([r.end - r.arrival if r.is_finished else np.nan for r in requests])
        self.block = block_numbers(len(requests))
        self._count_gaps(requests)
        self.is_good = np.full(len(requests), np.nan)  # NaN: no limits hold for it
        kinds = [request.kind for request in workload.requests]
        if slo is not None:
            timeouts = np.array([r.timeout or np.nan for r in workload.requests])
            durations = {name: getattr(self, name) for name in (*PER_REQUEST, "gap")}
            self.is_good = slo.judge(kinds, durations | {"overtime": self.e2e - timeouts})
            self.is_good[np.isnan(self.e2e) & ~np.isnan(self.is_good)] = 0.0
        self.totals = _totals(outcome, workload)
        self.totals |= good_totals(self.is_good, kinds, outcome.end)
        if reader is not None:
            self.quality = _quality(outcome, workload, reader)
            self.totals["quality"] = float(np.mean(self.quality))
            self.totals["quality_p10"] = quantile(self.quality, 0.1)
        if any(request.program >= 0 for request in workload.requests):
            self._measure_programs(outcome, workload, slo, alone)
        self.totals["service_difference"] = difference.largest
        self.totals["service_difference_mean"] = difference.mean
        self.finish_reasons = dict(sorted(Counter(r.finish_reason for r in requests).items()))

    def _measure_programs(
        self,
        outcome: RunOutcome,
        workload: Workload,
        slo: ServiceLevels | None,
        alone: RunOutcome | None,
    ) -> None:
        self.program = completion_times(outcome, workload)
        self.slowdown = np.full(len(self.program), np.nan)
        if alone is not None:
            self.slowdown = slowdowns(self.program, workload, alone)
        self.program_good = in_time(self.program, workload, slo)
        if not np.isnan(self.program_good).all():
            self.totals["programs_in_time"] = float(np.nanmean(self.program_good))
            kinds = [request.kind for request in workload.requests]
            self.totals |= _worst_class(self.is_good, self.program_good, kinds)

    @property
    def measured(self) -> tuple[str, ...]:
        """The names of the durations that requests and programs have."""
        return PER_REQUEST + PER_PROGRAM if hasattr(self, "program") else PER_REQUEST

    def _count_gaps(self, requests: list[RequestOutcome]) -> None:
        """Gaps between deliveries: exact quantiles, and counts by block for the bootstrap."""
        gaps = [np.diff(np.frombuffer(r.token_times)) for r in requests]
        self.gap = np.array([np.max(g) if len(g) else np.nan for g in gaps])  # the largest
        num_blocks = int(self.block[-1]) + 1 if len(requests) else 0
        self.gap_counts = np.zeros((num_blocks, len(GAP_EDGES) + 1), dtype=np.int64)
        for i, block in enumerate(self.block):
            bins = np.searchsorted(GAP_EDGES, gaps[i])
            np.add.at(self.gap_counts[block], bins, 1)
        self.gaps = np.sort(np.concatenate(gaps)).astype(np.float32) if gaps else np.empty(0)


def block_numbers(num_requests: int) -> Ints:
    """The block of consecutive requests that each belongs to.

    Neighbours share a queue, so they are not independent; blocks of them nearly are.
    """
    num_blocks = min(MAX_BLOCKS, max(num_requests // REQUESTS_PER_BLOCK, 1))
    return np.arange(num_requests) * num_blocks // max(num_requests, 1)


def quantile(values: npt.NDArray[np.floating[Any]], q: float) -> float:
    """The smallest value that at least a share `q` of `values` does not exceed; NaN of none."""
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return float("nan")
    return float(known[max(int(np.ceil(q * len(known))) - 1, 0)])


def tidy(value: float) -> float:
    """Six digits: more say nothing and fill the file."""
    return float(f"{value:.6g}")


def statistics_of(values: Floats) -> dict[str, float]:
    """Mean, quantiles and maximum of those that are known; NaN of none."""
    known = values[~np.isnan(values)]
    if not len(known):
        return dict.fromkeys(STATISTICS, float("nan"))
    quantiles = (quantile(known, q) for q in (0.5, 0.9, 0.99))
    found = float(np.mean(known)), *quantiles, float(np.max(known))
    return dict(zip(STATISTICS, found, strict=True))


def over_seeds(seeds: Sequence[Floats]) -> dict[str, float]:
    """Means over seeds of each one's mean and quantiles, and the maximum of all, in as many digits
    as a document has. Seeds with no known value are left out.
    """
    found = [statistics_of(values) for values in seeds if not np.isnan(values).all()]
    if not found:
        return statistics_of(np.empty(0))
    of_all = {name: float(np.mean([of[name] for of in found])) for name in STATISTICS}
    of_all["max"] = max(of["max"] for of in found)
    return {name: tidy(value) for name, value in of_all.items()}


def _per_output_token(request: RequestOutcome) -> float:
    times = request.token_times
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else np.nan


def good_totals(is_good: Floats, kinds: Sequence[str], seconds: float) -> dict[str, float]:
    """Goodput, the share of the requests with limits that were within them, and that of the worst
    class, if several classes have limits; nothing where no limits hold for any request.
    """
    known = ~np.isnan(is_good)
    if not known.any():
        return {}
    found = {
        "goodput_per_second": float(np.sum(is_good[known])) / max(seconds, 1e-9),
        "good_share": float(np.mean(is_good[known])),
    }
    return found | _worst_class(is_good, np.full(len(is_good), np.nan), kinds)


def _worst_class(is_good: Floats, program_good: Floats, kinds: Sequence[str]) -> dict[str, float]:
    """The least share of a class within its SLO, if several have one: of its requests, or of its
    programs where only these have limits.
    """
    of = np.array(kinds)
    shares = []
    for kind in sorted(set(kinds)):
        for good in (is_good, program_good):
            own = good[of == kind]
            if not np.isnan(own).all():
                shares.append(float(np.nanmean(own)))
                break
    return {"worst_class_share": min(shares)} if len(shares) > 1 else {}


def _quality(outcome: RunOutcome, workload: Workload, reader: Reader) -> Floats:
    return np.array(
        [
            reader.quality(
                np.frombuffer(result.token_times) - result.arrival,
                request.output_tokens,
                result.end - result.arrival,
            )
            for request, result in zip(workload.requests, outcome.requests, strict=True)
        ]
    )


def _totals(outcome: RunOutcome, workload: Workload) -> dict[str, Any]:
    """One number each for the whole run."""
    pairs = list(zip(workload.requests, outcome.requests, strict=True))
    seconds = max(outcome.end, 1e-9)
    num_output = sum(len(result.token_times) for _, result in pairs)
    num_prompt = sum(request.num_prompt_tokens for request, result in pairs if result.token_times)
    num_cached = sum(result.num_cached_tokens for _, result in pairs)
    # What the finished requests needed: each token once, but not the cached ones, nor the last,
    # which is never computed. All else was computed in vain: again after a preemption, or for
    # requests that were given up, or as a draft that turned out wrong.
    needed = sum(
        request.num_prompt_tokens - result.num_cached_tokens + len(result.token_times) - 1
        for request, result in pairs
        if result.is_finished
    )
    scheduled = outcome.num_scheduled_tokens
    num_finished = sum(result.is_finished for _, result in pairs)
    drafts: dict[str, float] = {}
    if outcome.num_draft_tokens:
        drafts["draft_tokens"] = outcome.num_draft_tokens
        drafts["right_draft_share"] = outcome.num_right_drafts / outcome.num_draft_tokens
    return {
        "seconds": outcome.end,
        "output_tokens_per_second": num_output / seconds,
        "total_tokens_per_second": (num_prompt + num_output) / seconds,
        "requests_per_second": num_finished / seconds,
        "prefix_hit_share": num_cached / max(num_prompt, 1),
        "wasted_share": (scheduled - needed) / max(scheduled, 1),
        "wasted_tokens": scheduled - needed,
        "preemptions": outcome.num_preemptions,
        "unfinished": len(pairs) - num_finished,
        "steps": outcome.num_steps,
        **drafts,
    }
