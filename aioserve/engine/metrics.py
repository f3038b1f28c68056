"""Counts and durations of one engine, which a scrape of /metrics reads.

Counted in plain integers on the event loop: a token costs two list increments. How they are told is
in `exposition`, which the first scrape loads. Begins with what counts are made of.
"""

import math
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from aioserve.engine.stream import SampleState
from aioserve.outputs import FinishReason, SchedulerStats
from aioserve.request import RequestSpec, WaitReason
from aioserve.support.parts import load

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import HistogramMetricFamily, Metric

    from aioserve.engine.operations.command import Counted, State
    from aioserve.kv_cache import KVConnectorBase


# Long enough to see more than one long prompt, short enough to notice a change. A guess.
RATE_SECONDS = 10.0

# Longer than scrapes are apart, so that each of them sees what has happened since the last one.
WORST_SECONDS = 60.0
WORST_PARTS = 6  # the window is forgotten in this many parts

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

#: Of tokens of a request.
LENGTH_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class Histogram(msgspec.Struct, array_like=True):
    """Counts over fixed upper bounds, in seconds or whatever the bounds are in."""

    bounds: Sequence[float] = LATENCY_BUCKETS
    counts: list[int] = []  # of values up to each bound and above the last, of each its own
    total: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Count one value, or `count` equal ones."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += count * value

    def family(self, name: str, documentation: str) -> "HistogramMetricFamily":
        """Return the histogram as Prometheus wants it: cumulative, with +Inf as the last bucket."""
        from prometheus_client.core import HistogramMetricFamily

        return HistogramMetricFamily(
            name, documentation, buckets=self.cumulative(), sum_value=self.total
        )

    def cumulative(self) -> list[tuple[str, float]]:
        """Return the cumulative counts: for each upper bound, how many values are not above it."""
        so_far, buckets = 0, []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            buckets.append((bound, float(so_far)))
        return buckets


class RecentWorst:
    """The largest value of the last `WORST_SECONDS` at least, however often it is asked for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_parts: deque[tuple[int, float]] = deque(maxlen=WORST_PARTS + 1)

    def observe(self, value: float) -> None:
        """Count one value that was seen now."""
        part = self._part()
        if self._of_parts and self._of_parts[-1][0] == part:
            value = max(value, self._of_parts.pop()[1])
        self._of_parts.append((part, value))

    def __call__(self) -> float:
        """Return the largest value; 0 if no value came."""
        first = self._part() - WORST_PARTS
        return max((value for part, value in self._of_parts if part >= first), default=0.0)

    def _part(self) -> int:
        return int(self._clock() / WORST_SECONDS * WORST_PARTS)


class RecentRate:
    """A recent rate per second: an average that forgets with `RATE_SECONDS`."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._since = self._last = math.nan

    def add(self, amount: float, now: float) -> None:
        """Add an amount that came at `now`, in seconds of any clock."""
        if math.isnan(self._since):
            self._since = self._last = now
        self._sum = self._faded(now) + amount
        self._last = now

    def per_second(self, now: float) -> float:
        """Return the rate at the time `now`; 0 if nothing was ever counted."""
        if math.isnan(self._since):
            return 0.0
        # What came before the beginning is not known to be nothing.
        age = max(now - self._since, 1.0)
        return self._faded(now) / (RATE_SECONDS * -math.expm1(-age / RATE_SECONDS))

    def _faded(self, now: float) -> float:
        return self._sum * math.exp((self._last - now) / RATE_SECONDS)


# The metrics of an engine.


class Latencies:
    """Times to first token and gaps between tokens since the last reading."""

    def __init__(self) -> None:
        self.first_tokens: list[float] = []  # seconds
        self.gaps: Counter[float] = Counter()  # how many, by seconds

    def take(self) -> tuple[list[float], list[tuple[float, int]]]:
        """Return both in milliseconds; gaps to three digits, with how many there are of each."""
        first_tokens = [round(1e3 * seconds, 2) for seconds in self.first_tokens]
        gaps: Counter[float] = Counter()
        for seconds, count in self.gaps.items():
            gaps[float(f"{1e3 * seconds:.3g}")] += count
        self.first_tokens, self.gaps = [], Counter()
        return first_tokens, list(gaps.items())


class RequestCounts(Protocol):
    """Counts of requests and tokens, kept as requests get their tokens."""

    num_generation_tokens: int

    def on_prompt_computed(self, state: SampleState, now: float) -> None:
        """Note the first token or a prompt's vector; `now` in seconds of the engine's clock."""

    def on_next_tokens(self, seconds: float, num_requests: int) -> None:
        """Count requests that have new tokens, `seconds` after their last ones."""

    def on_finished(
        self, state: SampleState, num_output_tokens: int, reason: FinishReason, now: float
    ) -> None:
        """Count the end of a request, and its latencies."""


class ShadowMetrics(Protocol):
    """The latencies that another policy would have given the requests that come."""

    shadow: Any  # None: there is none
    time_to_first_token: "Histogram"
    inter_token_latency: "Histogram"
    request_latency: "Histogram"


class KVConnectorMetrics(Protocol):
    """The metrics of a KV connector."""

    connector: "KVConnectorBase | None"  # set once it is made


#: Names of adapters in memory, names of those that requests wait for, and places for adapters.
Places = tuple[list[str], list[str], int]


class AdapterMetrics:
    """The counts of LoRA adapters since the start."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()  # by name
        self.num_loads = 0
        self.num_evictions = 0
        self.num_resident = 0
        self.get_places: Callable[[], Places] | None = None  # set once there is a runner


class Sources(NamedTuple):
    """The functions that a scrape asks for the state of scheduler and runner."""

    stats: Callable[[], SchedulerStats | None]
    wait_reasons: Callable[[], Counter[WaitReason]]
    num_policy_failures: Callable[[], int]
    is_policy_replaced: Callable[[], bool]
    num_compute_threads: Callable[[], int | None]
    info: Callable[[], Mapping[str, Mapping[str, str]]]  # what is set, as labels by name
    state: "Callable[[], State]"


class OtherMetrics(Protocol):
    """Metrics that are told beside those of the engine."""

    def collect(self) -> "Iterator[Metric]":
        """Yield them, for one scrape."""


class MetricsText(Protocol):
    """The metrics of an engine as text."""

    registry: "CollectorRegistry"  # where parts register collectors of their own

    def render(self) -> bytes:
        """Return all metrics in Prometheus text format."""


class EngineMetrics:
    """The counts of requests and tokens since the start, and their latencies."""

    def __init__(
        self, sources: Sources, make_text: Callable[["EngineMetrics"], MetricsText]
    ) -> None:
        """`make_text` is called with the first scrape."""
        self.sources = sources
        self._make_text = make_text
        self.adapters = AdapterMetrics()
        #: By process, in seconds: how late its event loop was recently. Set before a scrape.
        self.loop_lags: dict[str, float] = {}
        #: What the server has to tell besides; set by it.
        self.of_server: OtherMetrics | None = None
        #: Called with the name of the key that a request came with, tokens that it has more, and
        #: its id.
        self.on_tokens: Callable[[str, int, str], None] | None = None
        #: By process: how late it was while the process was busy.
        self.loop_delays: dict[str, Histogram] = {"engine": Histogram()}
        #: By process: what its server has counted. Set before a scrape.
        self.counted: dict[str, list[Counted]] = {}
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self.time_to_first_token = Histogram()
        self.inter_token_latency = Histogram()
        self.request_latency = Histogram()
        self.queue_time = Histogram()
        self.prefill_time = Histogram()
        self.decode_time = Histogram()
        self.inference_time = Histogram()
        self.prompt_lengths = Histogram(LENGTH_BUCKETS)
        self.output_lengths = Histogram(LENGTH_BUCKETS)
        self.prompt_token_rate = RecentRate()  # as requests get their first tokens
        self.latencies: Latencies | None = None  # while a page looks

    @cached_property
    def _text(self) -> MetricsText:
        return self._make_text(self)

    def render(self) -> bytes:
        """Return all metrics in Prometheus text format."""
        return self._text.render()

    @cached_property
    def shadow(self) -> ShadowMetrics:
        """Metrics of what the shadow policy would have done; registered when it is asked for."""
        made: ShadowMetrics = load("engine", "shadow metrics")(self._text.registry)
        return made

    @cached_property
    def kv_connector(self) -> KVConnectorMetrics:
        """Metrics of the KV connector; registered when it is asked for."""
        made: KVConnectorMetrics = load("engine", "KV connector metrics")(self._text.registry)
        return made

    def on_accepted(self, spec: RequestSpec) -> None:
        """A request is in the queue, with all its samples."""
        if spec.key_name and self.on_tokens is not None:
            self.on_tokens(spec.key_name, len(spec.prompt_token_ids), spec.request_id)

    def on_prompt_computed(self, state: SampleState, now: float) -> None:
        request = state.request
        self.prompt_token_rate.add(request.num_prompt_tokens, now)
        self.num_prompt_tokens += request.num_prompt_tokens
        if request.pooling_params is None:  # it has a first token
            self.time_to_first_token.observe(now - request.arrival_time)
            if self.latencies is not None:
                self.latencies.first_tokens.append(now - request.arrival_time)

    def on_next_tokens(self, seconds: float, num_requests: int) -> None:
        self.inter_token_latency.observe(seconds, num_requests)
        if self.latencies is not None:
            self.latencies.gaps[seconds] += num_requests

    def on_finished(
        self, state: SampleState, num_output_tokens: int, reason: FinishReason, now: float
    ) -> None:
        request = state.request
        seconds = now - request.arrival_time
        self.finished[reason] += 1
        self.request_latency.observe(seconds)
        if request.spec.key_name and self.on_tokens is not None:
            self.on_tokens(request.spec.key_name, num_output_tokens, request.request_id)
        self.prompt_lengths.observe(request.num_prompt_tokens)
        self.output_lengths.observe(num_output_tokens)
        self._observe_phases(state, now)

    def _observe_phases(self, state: SampleState, now: float) -> None:
        """Note phases. A request that was never served only queued; without a token, none is
        decode. It may have been preempted in either phase.
        """
        served = now if state.scheduled_time is None else state.scheduled_time
        self.queue_time.observe(served - state.request.arrival_time)
        if state.scheduled_time is not None:
            first = now if state.first_token_time is None else state.first_token_time
            self.prefill_time.observe(first - served)
            self.inference_time.observe(now - served)
            if state.first_token_time is not None:
                self.decode_time.observe(now - first)
