"""From what happened in a run to the numbers by which runs are compared, and their rows.

Knows one run at a time. All durations are in seconds; what is undefined is NaN, never 0: a request
without a first token has no time to it. The quality of experience is that of Liu et al., "Andes:
Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming Services", 2024 (arXiv
2404.16283).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import ConfigError, did_you_mean
from aioserve.lab.comparison.service import Floats, fairness_totals, service_by_client
from aioserve.lab.simulation.outcome import RequestOutcome, RunOutcome
from aioserve.lab.slo import ServiceLevels
from aioserve.lab.terminal import DURATIONS
from aioserve.lab.workloads.workload import Incidents, Workload, WorkloadRequest

if TYPE_CHECKING:
    from aioserve.lab.simulation.fleet_plan import Fleet
    from aioserve.lab.simulation.fleet_replicas import FleetOutcome

DEFAULT_TTFT = 1.0  # seconds; what the paper takes for readers of chats


class Reader(msgspec.Struct, frozen=True):
    """Reads `speed` tokens a second, and expects the first after `ttft` seconds."""

    speed: float
    ttft: float = DEFAULT_TTFT

    @classmethod
    def parse(cls, text: str) -> "Reader":
        """Parse `5` tokens per second, or `5,ttft=2`. Raises `ConfigError`."""
        speed, comma, ttft = text.partition(",ttft=")
        try:
            reader = cls(float(speed), float(ttft) if comma else DEFAULT_TTFT)
        except ValueError:
            reader = cls(0.0)
        if not (0 < reader.speed < np.inf and 0 <= reader.ttft < np.inf):
            raise ConfigError(
                "the reading speed must be tokens per second above 0 such as 5, or with the "
                f"expected time to the first token such as 5,ttft=1; got {text!r}"
            )
        return reader

    def quality(self, token_times: Floats, num_tokens: int, end: float) -> float:
        """Return the quality, from 0 to 1, of a reply of `num_tokens` tokens that ended `end`
        seconds after its arrival and whose tokens came at `token_times`: 1 if each was there when
        it was to be read.

        The reader expects token k at e(k) = ttft + (k - 1) / speed, and reads it at r(k), when it
        has come and the one before is read, but no sooner than expected. The time to read one is
        1 / speed, and L is the end of reading. The quality is 1 - lost / whole: the sum of
        r(k) - e(k), over the area under the expected curve up to L. Of a token that never came,
        all of its area is lost.
        """
        pace = 1 / self.speed
        expected = self.ttft + pace * np.arange(num_tokens)
        came = token_times[:num_tokens]
        # r(k) - e(k) is the largest lateness of any token up to k: reading catches nothing up.
        late = np.maximum.accumulate(np.maximum(came - expected[: len(came)], 0.0))
        is_whole = len(came) == num_tokens
        last = late[-1] if len(came) else 0.0
        reading_end = expected[-1] + last + pace
        if not is_whole:
            reading_end = max(reading_end, end)
        areas = reading_end - expected - pace / 2
        lost = float(np.sum(late)) + float(np.sum(areas[len(came) :]))
        return 1 - lost / float(np.sum(areas))


# Programs of several requests. Of each array, a program's entry is that of its first request; all
# others are NaN.


PAUSE = 1.0  # seconds between programs that run alone: the engine has nothing left to do


def programs_of(workload: Workload) -> list[list[int]]:
    """Return the requests of each program, by their places, in order; programs by their first
    request.
    """
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, request in enumerate(workload.requests):
        if request.program >= 0:
            found[request.program, request.crowd].append(i)
    return list(found.values())


def aborts(workload: Workload, program: list[int]) -> bool:
    """Return whether the client of a program leaves before its end."""
    return any(workload.requests[i].aborts for i in program)


def completion_times(outcome: RunOutcome, workload: Workload) -> Floats:
    """Return seconds from the first arrival of a program to its last token; NaN where the client
    left, or where some request did not finish.
    """
    found = np.full(len(workload.requests), np.nan)
    for program in programs_of(workload):
        results = [outcome.requests[i] for i in program]
        if all(result.is_finished for result in results) and not aborts(workload, program):
            begin = min(result.arrival for result in results)
            found[program[0]] = max(result.end for result in results) - begin
    return found


def in_time(completion: Floats, workload: Workload, slo: ServiceLevels | None) -> Floats:
    """1 for a program that completed within the limit of its class, 0 for one that did not or that
    failed; NaN where there is no limit, or where the client left.
    """
    found = np.full(len(completion), np.nan)
    for program in programs_of(workload):
        own = None if slo is None else slo.of_class(workload.requests[program[0]].kind)
        if own is not None and own.program is not None and not aborts(workload, program):
            found[program[0]] = float(completion[program[0]] <= own.program)
    return found


def one_by_one(workload: Workload) -> Workload:
    """Return the programs alone, one after the other: each begins when nothing of the one before is
    left, with texts of its own, so that no cache holds anything for it. Its own pauses stay.
    """
    requests: list[WorkloadRequest] = []
    before: tuple[int, ...] = ()
    for number, program in enumerate(programs_of(workload)):
        parts = [workload.requests[i] for i in program]
        begin = min((r.arrival for r in parts if not _is_inside(r.waits_for, program)), default=0.0)
        places = {place: len(requests) + i for i, place in enumerate(program)}
        for request in parts:
            if _is_inside(request.waits_for, program):
                waits_for = tuple(places[i] for i in request.waits_for if i in places)
                arrival = request.arrival
            else:
                waits_for, arrival = before, request.arrival - begin + (PAUSE if before else 0.0)
            pieces = tuple(
                p if p.reply_of < 0 else p._replace(reply_of=places[p.reply_of])
                for p in request.pieces
            )
            requests.append(
                msgspec.structs.replace(
                    request,
                    arrival=arrival,
                    pieces=pieces,
                    follows=waits_for[0] if waits_for else -1,
                    after=waits_for[1:],
                    crowd=number,
                )
            )
        before = tuple(places.values())
    return msgspec.structs.replace(workload, requests=tuple(requests), incidents=Incidents())


def _is_inside(waits_for: tuple[int, ...], program: list[int]) -> bool:
    return any(place in program for place in waits_for)


def slowdowns(completion: Floats, workload: Workload, alone: RunOutcome) -> Floats:
    """Completion times over those of the same programs `alone`, the outcome of `one_by_one`."""
    times = completion_times(alone, one_by_one(workload))
    found = np.full(len(completion), np.nan)
    firsts, place = [], 0
    for program in programs_of(workload):
        firsts.append((program[0], place))
        place += len(program)
    for first, place in firsts:
        found[first] = completion[first] / times[place]
    return found


# A fleet besides what its clients saw: how busy, how even, at what price.


SECONDS_PER_HOUR = 3600.0
MILLION = 1e6


def fleet_totals(
    outcome: "FleetOutcome", fleet: "Fleet", totals: dict[str, float]
) -> dict[str, float]:
    """Return one number each, to stand beside `totals`. Prices are in the currency of the
    fleet's.
    """
    seconds = max(outcome.end, 1e-9)
    busy = outcome.busy_seconds
    mean = sum(busy) / len(busy)
    paid = outcome.replica_seconds
    found = {
        "busy_share": sum(busy) / max(paid, 1e-9),
        "busiest_to_mean": max(busy) / max(mean, 1e-9),
        "resent": float(outcome.num_resent),
    }
    if fleet.autoscaling is not None:
        found["replicas"] = paid / seconds
    if fleet.transfer_gb_per_second is not None:
        found["moved"] = float(outcome.num_moved)
    if (prices := fleet.prices) is not None:
        pairs = zip(prices, outcome.paid_seconds, strict=True)
        found |= price_totals(sum(price * own for price, own in pairs) / seconds, totals)
    return found


def price_totals(price_per_hour: float, totals: dict[str, float]) -> dict[str, float]:
    """Return the prices of a million tokens where an hour of all cards costs so much."""
    price = price_per_hour / SECONDS_PER_HOUR  # of a second
    return {
        f"price_per_million_{name}": MILLION
        * price
        / max(totals[f"{name}_tokens_per_second"], 1e-9)
        for name in ("output", "total")
    }


def joules_of(
    watts: Sequence[tuple[float, float]],
    busy_seconds: Sequence[float],
    paid_seconds: Sequence[float],
    saved_seconds: Sequence[float],
) -> float:
    """Return the joules of replicas that draw `watts`, each the first value while a step runs and
    the second between steps; lower clocks have saved the energy of `saved_seconds` of steps.
    """
    times = zip(watts, busy_seconds, paid_seconds, saved_seconds, strict=True)
    return sum(
        busy * (seconds - saved) + idle * max(paid - seconds, 0.0)
        for (busy, idle), seconds, paid, saved in times
    )


def energy_totals(
    watts: Sequence[tuple[float, float]],
    busy_seconds: Sequence[float],
    paid_seconds: Sequence[float],
    outcome: RunOutcome,
) -> dict[str, float]:
    """Return joules per output token and per request that was served, of replicas that draw
    `watts`, each the first value while a step runs and the second between steps.
    """
    joules = joules_of(watts, busy_seconds, paid_seconds, outcome.saved_seconds)
    num_tokens = sum(len(request.token_times) for request in outcome.requests)
    num_requests = sum(bool(request.token_times) for request in outcome.requests)
    return {
        "joules_per_output_token": joules / max(num_tokens, 1),
        "joules_per_request": joules / max(num_requests, 1),
    }


# The numbers by which runs are compared. Durations are in seconds; what is undefined is NaN, never
# 0: a request without a first token has no time to it.


Ints = npt.NDArray[np.int64]

# Gaps between tokens are too many to keep: counted in bins 1% apart, from 10 microseconds up.
GAP_EDGES = 1e-5 * 1.01 ** np.arange(1900)
MAX_BLOCKS = 50  # of consecutive requests, for the bootstrap
REQUESTS_PER_BLOCK = 20
MIN_OF_CLIENT = 10  # requests with limits: a share of fewer says little of a client

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
        self.totals |= fairness_totals(self.service)
        self.totals |= self._shares_of_groups(workload)
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

    def _shares_of_groups(self, workload: Workload) -> dict[str, float]:
        """Return the mean share in time over classes, where it is another one than that of all
        requests, and the least share of a client that is large enough to have one.
        """
        found = {}
        kinds = [request.kind for request in workload.requests]
        shares = self.shares_in_time(kinds)
        if len(shares) > 1 or "programs_in_time" in self.totals:
            found["in_time"] = float(np.mean(list(shares.values())))
        users = Counter(
            request.user
            for request, good in zip(workload.requests, self.is_good, strict=True)
            if not np.isnan(good)
        )
        large = {user for user, count in users.items() if count >= MIN_OF_CLIENT}
        if len(large) > 1:
            names = np.array([request.user for request in workload.requests])
            found["worst_client_share"] = min(
                float(np.nanmean(self.is_good[names == user])) for user in large
            )
        return found

    def shares_in_time(self, kinds: Sequence[str]) -> dict[str, float]:
        """Return the share of each class that kept to its limits, of its requests and programs
        together; without the classes that have no limits. `kinds` are the classes of the requests.
        """
        of, found = np.array(kinds), {}
        good = [self.is_good, *([self.program_good] if hasattr(self, "program_good") else [])]
        for kind in dict.fromkeys(kinds):
            own = np.concatenate([values[of == kind] for values in good])
            if not np.isnan(own).all():
                found[kind] = float(np.nanmean(own))
        return found

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
    """Return the block of consecutive requests that each belongs to.

    Neighbours share a queue, so they are not independent; blocks of them nearly are.
    """
    num_blocks = min(MAX_BLOCKS, max(num_requests // REQUESTS_PER_BLOCK, 1))
    return np.arange(num_requests) * num_blocks // max(num_requests, 1)


def quantile(values: npt.NDArray[np.floating[Any]], q: float) -> float:
    """Return the smallest value that at least a share `q` of `values` does not exceed; NaN
    of none.
    """
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
    """Return the least share of a class within its SLO, if several have one: of its requests, or of
    its programs where only these have limits.
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
    """Return one number each for the whole run."""
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


# The rows of a comparison: measures with their units, what they mean, which is better.


NOISE = "not distinguishable from noise"
UNKNOWN = "no interval from one run"
TINY = "less than 1% apart"


class Row(NamedTuple):
    """One line of a table: a measure, and how to show it."""

    label: str
    measure: str
    statistic: str
    unit: str  # appended to differences in words
    factor: float  # from the document's unit to the shown one
    digits: int
    good: int  # +1: more is better, -1: less is, 0: neither


def _durations() -> list[Row]:
    rows = []
    for label, measure, statistics in (
        ("TTFT", "ttft", ("mean", "p50", "p99")),
        ("TPOT", "tpot", ("mean", "p50", "p99")),
        ("gap", "gap", ("p50", "p99", "max")),
        ("end to end", "e2e", ("mean", "p50", "p99")),
    ):
        rows += [Row(f"{label} {s}, ms", measure, s, "ms", 1e3, 1, -1) for s in statistics]
    return rows


#: The mean over classes of the share in time; by it the zoo ranks policies.
IN_TIME = Row("in time, %", "totals", "in_time", "points", 100, 1, 1)
ROWS = [
    *_durations(),
    *(Row(f"program {s}, s", "program", s, "s", 1, 2, -1) for s in ("mean", "p50", "p99")),
    Row("slowdown mean", "slowdown", "mean", "", 1, 2, -1),
    Row("slowdown p99", "slowdown", "p99", "", 1, 2, -1),
    Row("programs in time, %", "totals", "programs_in_time", "points", 100, 1, 1),
    Row("output tokens/s", "totals", "output_tokens_per_second", "tokens/s", 1, 1, 1),
    Row("all tokens/s", "totals", "total_tokens_per_second", "tokens/s", 1, 0, 1),
    Row("goodput, requests/s", "totals", "goodput_per_second", "requests/s", 1, 2, 1),
    Row("within the SLO, %", "totals", "good_share", "points", 100, 1, 1),
    Row("worst class, %", "totals", "worst_class_share", "points", 100, 1, 1),
    IN_TIME,
    Row("worst client, %", "totals", "worst_client_share", "points", 100, 1, 1),
    Row("QoE mean", "totals", "quality", "", 1, 3, 1),
    Row("QoE p10", "totals", "quality_p10", "", 1, 3, 1),
    Row("service apart max", "totals", "service_difference", "", 1, 0, -1),
    Row("service apart mean", "totals", "service_difference_mean", "", 1, 0, -1),
    Row("Jain's index", "totals", "jains_index", "", 1, 3, 1),
    Row("least of its due, %", "totals", "worst_client_due", "points", 100, 1, 1),
    Row("prefix hits, %", "totals", "prefix_hit_share", "points", 100, 1, 1),
    Row("wasted tokens, %", "totals", "wasted_share", "points", 100, 2, -1),
    Row("draft tokens", "totals", "draft_tokens", "", 1, 0, 0),
    Row("right drafts, %", "totals", "right_draft_share", "points", 100, 1, 1),
    Row("preemptions", "totals", "preemptions", "", 1, 1, -1),
    Row("unfinished requests", "totals", "unfinished", "", 1, 1, -1),
    Row("busy, %", "totals", "busy_share", "points", 100, 1, 0),
    Row("replicas", "totals", "replicas", "", 1, 2, -1),
    Row("busiest to mean", "totals", "busiest_to_mean", "", 1, 2, -1),
    Row("sent again", "totals", "resent", "", 1, 1, -1),
    Row("moved", "totals", "moved", "", 1, 0, 0),
    Row("J per output token", "totals", "joules_per_output_token", "", 1, 3, -1),
    Row("J per request", "totals", "joules_per_request", "", 1, 1, -1),
    Row("price, 1M output", "totals", "price_per_million_output", "", 1, 3, -1),
    Row("price, 1M tokens", "totals", "price_per_million_total", "", 1, 3, -1),
]


# By what labels begin with. One sentence each, for a reader who has not met them.
MEANINGS = {
    "J per": "joules that the cards draw, at the limits of their boards while steps run",
    **DURATIONS,
    "output tokens/s": "Tokens of replies per second, from the first arrival to the last token.",
    "all tokens/s": "The same with the tokens of prompts.",
    "goodput": "Requests per second that finished within all limits of the SLO.",
    "within the SLO": "The share of the requests with an SLO that kept to all of its limits.",
    "program": (
        "From the first arrival of a program of several requests, pauses of tools included, to its "
        "last token, of those that got there."
    ),
    "slowdown": "That time over the program's own when it runs alone on an empty engine.",
    "programs in time": "The share of the programs that completed within their SLO's `program`.",
    "worst class": "The share within the SLO of the class of which it is the lowest.",
    "in time": (
        "The mean over the classes of the share of their requests and programs within all limits: "
        "classes count alike, however many requests they have."
    ),
    "worst client": (
        f"The share within the SLO of the client of which it is the lowest, among clients with at "
        f"least {MIN_OF_CLIENT} such requests."
    ),
    "Jain's index": (
        "How evenly clients got what was due to them while they competed: 1 if all got the same "
        "share of it, 1 over their number if one got all."
    ),
    "least of its due": (
        "What the worst-off client got of what was due to it by weight, while it and another one "
        "had requests waiting."
    ),
    "QoE": (
        "Quality of experience (Andes): 1 if every token is there when its reader comes to it, "
        "less the area that late tokens take from the curve of what was to be read."
    ),
    "service apart": (
        "Fairness as VTC has it: how differently two clients were served while both had requests "
        "waiting (1 for a token of a prompt, 2 for one of a reply, divided by weights)."
    ),
    "prefix hits": "The share of prompt tokens that were found in the KV cache.",
    "wasted tokens": (
        "Computed again after a preemption, for requests that never finished, or as wrong drafts: "
        "as a share of all that was computed."
    ),
    "draft tokens": "Guessed tokens that were computed to be verified.",
    "right drafts": "The share of them that was right, and so was kept.",
    "preemptions": "How often a running request had to give its memory back.",
    "unfinished requests": "Ended before their last token: timed out, refused, failed.",
    "busy": "The share of the time in which steps ran, over all replicas of the fleet.",
    "replicas": "Replicas that were paid for, on average; one that starts is paid for.",
    "busiest to mean": "The time in which steps ran at the busiest replica, over the mean of all.",
    "sent again": "Requests whose replica died before it had streamed anything of the reply.",
    "price": (
        "What the engine or the fleet costs in the time of the run, at the price stated, over the "
        "millions of tokens of replies, or of prompts and replies."
    ),
    "p50, p99": "The value that 50%, or 99%, of the requests (or gaps) do not exceed.",
}


def key(row: Row) -> str:
    """Return the name of a row's measure on the command line and in files: `ttft:p99`,
    `good_share`.
    """
    return row.statistic if row.measure == "totals" else f"{row.measure}:{row.statistic}"


def rows_of(columns: Iterable[tuple[str, str]]) -> list[Row]:
    """Return the table's rows of `columns`, each a measure and a statistic."""
    by_name = {(row.measure, row.statistic): row for row in ROWS}
    return [by_name[column] for column in columns]


def parse_measure(text: str) -> Row:
    """Return the row that `e2e:mean` or `good_share` names, of those of which more or less is
    better. Raises `ConfigError` that lists them.
    """
    found = {key(row): row for row in ROWS if row.good and row.measure != "slowdown"}
    found = {name: row for name, row in found.items() if row.statistic != "max"}
    if text not in found:
        raise ConfigError(
            f"unknown measure {text!r}{did_you_mean(text, found)}; there are {', '.join(found)}"
        )
    return found[text]


def meanings(rows: list[Row]) -> dict[str, str]:
    """Return the meanings of rows, and of the words in their labels."""
    labels = [row.label for row in rows] + ["p50, p99"]
    return {
        word: meaning
        for word, meaning in MEANINGS.items()
        if any(label.startswith(word) for label in labels)
    }


def value_of(result: dict[str, Any], row: Row) -> float:
    """Return the value of a row under one configuration, in the row's unit; NaN if there is
    none.
    """
    section = (
        result["totals"] if row.measure == "totals" else result["durations"].get(row.measure, {})
    )
    value = section.get(row.statistic)  # without an SLO there is no goodput
    return math.nan if value is None else value * row.factor


def verdict(difference: dict[str, Any] | None, row: Row, first: float) -> str:
    """Return a difference against the value `first` in words: better, worse, or neither."""
    if difference is None:
        return ""
    if difference["is_nothing"]:
        return "the same"
    if difference["low"] is None:
        return UNKNOWN
    if not difference["is_distinguishable"]:
        return NOISE
    if max(abs(difference["low"]), abs(difference["high"])) * row.factor < 0.01 * abs(first):
        return TINY
    if row.good == 0:
        return "higher" if difference["value"] > 0 else "lower"
    return "better" if difference["value"] * row.good > 0 else "worse"


def shown_rows(results: list[dict[str, Any]]) -> list[Row]:
    """Return rows that say something: some value is known and not 0."""
    return [
        row
        for row in ROWS
        if any(value_of(r, row) != 0 and not math.isnan(value_of(r, row)) for r in results)
    ]


def difference_of(result: dict[str, Any], row: Row) -> dict[str, Any] | None:
    """Return the difference against the first configuration; None for the first, and for maxima."""
    if "against_first" not in result:
        return None
    found = result["against_first"]["differences"].get(row.measure, {}).get(row.statistic)
    return found if found is None or found["value"] is not None else None


EQUAL = "equal"  # an interval within which no digit that is shown differs


def number(value: float, row: Row) -> str:
    """Return a value with the digits of the row."""
    return "-" if math.isnan(value) else f"{value:.{row.digits}f}"


def signed(value: float, row: Row) -> str:
    """Return a difference: with its sign, unless it rounds to nothing."""
    text = f"{value:+.{row.digits}f}"
    return text if float(text) else text[1:]


def span(low: float, high: float, row: Row) -> str:
    """Return the ends of an interval of differences; `EQUAL` if both round to nothing."""
    ends = [signed(end, row) for end in (low, high)]
    return " .. ".join(ends) if any(map(float, ends)) else EQUAL
