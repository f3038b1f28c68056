"""Frames of the scheduler at work, some per second, while a browser is subscribed.

Lets a `FeedObserver` observe the step loop when the first browser comes, and takes it away when
the last has gone. A frame is encoded once for all; a browser that is too slow gets a snapshot
instead, so none has a queue. Knows no HTTP: a look is a question, from here or from another
process.
"""

import asyncio
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from aioserve.config import EngineConfig, SchedulerConfig
from aioserve.engine.clock import Clock, LoopLag
from aioserve.engine.core import EngineLoop
from aioserve.engine.metrics import EngineMetrics, Latencies, ShadowMetrics
from aioserve.engine.operations.command import Seen
from aioserve.engine.step_loop import StepObserver
from aioserve.errors import EngineDeadError, RequestError
from aioserve.outputs import FinishReason, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerInterface, SchedulerOutput
from aioserve.scheduler.delegate import innermost
from aioserve.scheduler.descriptions import OptionField, describe_options, describe_policies
from aioserve.support import __version__

# What a page that watches the scheduler at work is told: plain data, a few times a second. Requests
# go by number, in the order in which they were first told of; times are milliseconds since the
# watching began. Knows nothing about what sends the frames, nor what reads them.


class Came(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request, when it is first told of."""

    number: int
    shown_id: str  # made of its id, and opens nothing
    user: str
    priority: int
    num_prompt_tokens: int
    max_tokens: int | None  # that it may get; None: until the model's limit
    arrival: float


class Stands(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state of a request when the picture was taken."""

    came: Came
    state: str  # queued, running, preempted, paused
    reason: str  # why it waits; empty: it does not
    num_computed: int
    num_output_tokens: int
    num_cached: int
    num_preemptions: int


class Planned(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step was planned. Its rows are told as differences from the step before."""

    step_id: int
    time: float
    joined: list[int]  # in this step, and not in the one before
    left: list[int]  # in the one before, and not in this
    tokens: list[tuple[int, int]]  # how many, of those that have more than one
    admitted: list[tuple[int, int]]  # request that enters the batch, its computed tokens
    preempted: list[int]
    num_tokens: int  # in all
    num_running: int  # afterwards
    num_waiting: int
    num_used_blocks: int
    encoded: list[tuple[int, int]]  # request whose images it encodes, their tokens
    paused: list[int]  # they keep their KV blocks


class Back(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step is back: one token for each request in it, except those that are named."""

    step_id: int
    time: float
    tokens: list[tuple[int, int]]  # how many, of those that did not get one


class Waits(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A waiting request, and why it was not served; told when the reason is another one."""

    number: int
    step_id: int
    reason: str


class Ended(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a request: when, and for which reason."""

    number: int
    time: float
    reason: str  # as the HTTP API has it
    num_output_tokens: int


class Switched(msgspec.Struct, frozen=True, array_like=True):
    """Another policy decides from here on."""

    time: float
    policy: str
    options: dict[str, Any]


class Events(msgspec.Struct, frozen=True, kw_only=True):
    """The events of a frame, in order within each list."""

    came: list[Came]
    planned: list[Planned]
    back: list[Back]
    waits: list[Waits]
    ended: list[Ended]
    switched: list[Switched]


class Lease(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A cached prefix that the policy or its client keeps for the next turn of a conversation."""

    user: str
    shown_id: str  # made of the conversation's name, and opens nothing
    num_blocks: int  # those that others hold, too, included
    ends: float


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the engine; totals since its start."""

    loop_lag: float  # ms, the worst since the last frame
    num_running: int
    num_waiting: int
    num_used_blocks: int  # that requests or leases hold
    num_leased_blocks: int  # that leases hold, and no request does
    num_leases: int
    leases: list[Lease]  # the newest, some of them if there are many
    num_cached_blocks: int  # held by none, with content that can be found again
    num_free_blocks: int  # without
    num_output_tokens: int
    step_limit: int  # most tokens in a step, as the policy began the last one
    of_policy: dict[str, float]  # what the policy shows of itself, by name
    first_tokens: list[float]  # since the last frame: how long each was waited for, ms
    gaps: list[tuple[float, int]]  # between two deliveries to one request, ms, and how many


class Histograms(msgspec.Struct, frozen=True, kw_only=True):
    """Counts by upper bound, not cumulative, since the start."""

    first_token: list[int]
    gap: list[int]
    whole: list[int]  # from arrival to the end


class Shadow(msgspec.Struct, frozen=True, kw_only=True):
    """The policy that follows in virtual time, beside the live one."""

    policy: str
    bounds: list[float]  # of the histograms, seconds; what is above has a count of its own
    live: Histograms
    shadow: Histograms
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_resets: int
    is_failed: bool


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a server that do not change from frame to frame."""

    version: str
    model: str
    policy: str
    options: dict[str, Any]
    policies: dict[str, str]  # that are installed, with a line on each
    policy_options: dict[str, list[OptionField]]  # of those policies whose source declares some
    is_simulated: bool  # no model computes: steps take the time of a profile, tokens are invented
    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_model_len: int
    unix_time: float  # when the watching began, seconds


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="frame"):
    """The events since the frame before."""

    number: int
    now: float
    events: Events
    gauges: Gauges
    shadow: Shadow | None = None  # once a second, if there is one


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="snapshot"):
    """How everything stands: the first frame, and the next one for a page that missed a frame."""

    number: int
    now: float
    about: About
    requests: list[Stands]
    rows: list[int]  # of the last step
    gauges: Gauges
    shadow: Shadow | None = None


# Notes what a scheduler does, for the page that shows it live: a few list entries per step.
# Observes the step loop only while a page looks, and changes nothing there. Knows no event loop and
# no socket: `LiveFeed` makes frames of its notes.


# While no more requests than this wait, each step is asked why; of more, each frame is. So a long
# queue costs as much as a short one. A guess: 10 us per step.
MAX_ASKED_EACH_STEP = 64

_STATES = {
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.PAUSED: "paused",
}


class FeedObserver(StepObserver):
    """Notes of one engine, between two frames. If it fails, it hears no more, and the server goes
    on.
    """

    def __init__(
        self,
        scheduler: Callable[[], SchedulerInterface],
        policy: BaseScheduler,
        clock: Callable[[], float],
    ) -> None:
        """`scheduler` returns the engine's, which a switch of the policy may replace; `policy` is
        the one that plans now, and has the requests that are there already.
        """
        self.began = clock()
        self.kv_cache = policy.kv_cache
        self.pool = policy.kv_cache.pool
        self._scheduler = scheduler
        self._numbers: dict[str, int] = {}  # of requests that have not ended
        self._requests: dict[int, Request] = {}
        self._num_told = 0
        self._rows: dict[str, int] = {}  # tokens by request, of the last step
        self._row_numbers: list[int] = []  # numbers of the requests in `_rows`: ids may be reused
        self._reasons: dict[int, str] = {}  # as told last
        self._is_to_ask = False  # why requests wait, after the next step, however many they are
        self._clear()
        for request in policy.get_requests():
            self.on_added(request, self.began)
        self._came.clear()  # pictures have them

    def _clear(self) -> None:
        self._came: list[Came] = []
        self._planned: list[Planned] = []
        self._back: list[Back] = []
        self._waits: list[Waits] = []
        self._ended: list[Ended] = []
        self._switched: list[Switched] = []

    # What is told.

    @property
    def has_events(self) -> bool:
        """Whether anything happened since they were taken."""
        steps, requests = self._planned or self._back, self._came or self._ended or self._waits
        return bool(steps or requests or self._switched)

    def take_events(self) -> Events:
        """Return what happened since the last call."""
        events = Events(
            came=self._came,
            planned=self._planned,
            back=self._back,
            waits=self._waits,
            ended=self._ended,
            switched=self._switched,
        )
        self._clear()
        self._is_to_ask = True
        return events

    def picture(self) -> tuple[list[Stands], list[int]]:
        """Return where each request stands, and the rows of the last step. What the next events
        tell comes after it only if the last were taken just before.
        """
        reasons = self._reasons
        stands = [
            Stands(
                self._describe(number, request),
                _STATES.get(request.status, "queued"),
                reasons.get(number, ""),
                request.num_computed_tokens,
                request.num_output_tokens,
                request.num_cached_tokens,
                request.num_preemptions,
            )
            for number, request in self._requests.items()
        ]
        return stands, self._row_numbers

    def since_began(self, time: float) -> float:
        """Milliseconds from the beginning to a time of the clock."""
        return round(1e3 * (time - self.began), 2)

    # What is noted.

    def on_added(self, request: Request, now: float) -> None:
        self._num_told = number = self._num_told + 1
        self._numbers[request.request_id] = number
        self._requests[number] = request
        self._came.append(self._describe(number, request))

    def on_planned(self, output: SchedulerOutput, now: float) -> None:
        num_running, num_waiting = self._scheduler().get_request_counts()
        if num_waiting and (self._is_to_ask or num_waiting <= MAX_ASKED_EACH_STEP):
            self._note_reasons(output.step_id)
        rows, numbers = output.num_scheduled_tokens, self._numbers
        if not (rows or output.preempted_req_ids):
            return
        joined: list[int] = []
        left: list[int] = []
        tokens: list[tuple[int, int]] = []
        if rows is not self._rows:  # steps that run the same rows share them
            before, after = self._row_numbers, [numbers[row] for row in rows]
            joined = _without(after, before)
            left = _without(before, after)
            self._rows, self._row_numbers = rows, after
        if output.total_num_scheduled_tokens != len(rows):
            tokens = [(numbers[row], count) for row, count in rows.items() if count != 1]
        self._planned.append(
            Planned(
                output.step_id,
                self.since_began(now),
                joined,
                left,
                tokens,
                [(numbers[n.request_id], n.num_computed_tokens) for n in output.scheduled_new_reqs],
                _numbers_of(output.preempted_req_ids, numbers, output.paused_req_ids),
                output.total_num_scheduled_tokens,
                num_running,
                num_waiting,
                self.pool.num_used_blocks,
                self._encoded(output) if output.scheduled_encoder_inputs else [],
                _numbers_of(output.paused_req_ids, numbers),
            )
        )

    def on_back(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        counts = list(map(len, result.sampled_token_ids))
        tokens: list[tuple[int, int]] = []
        if counts.count(1) != len(counts):
            numbers = self._numbers
            tokens = [
                (numbers[row], count)
                for row, count in zip(result.req_ids, counts, strict=True)
                if count != 1 and row in numbers
            ]
        self._back.append(Back(output.step_id, self.since_began(now), tokens))

    def on_ended(self, request_ids: list[str], reason: FinishReason, now: float) -> None:
        for request_id in request_ids:
            number = self._numbers.pop(request_id, None)
            if number is not None:
                request = self._requests.pop(number)
                self._ended.append(
                    Ended(number, self.since_began(now), str(reason), request.num_output_tokens)
                )

    def on_switched(self, settings: SchedulerConfig, now: float) -> None:
        self._switched.append(Switched(self.since_began(now), settings.policy, settings.options))

    # How.

    def _describe(self, number: int, request: Request) -> Came:
        return Came(
            number,
            shown_id(request.request_id),
            request.user,
            request.priority,
            request.num_prompt_tokens,
            request.sampling_params.max_tokens,
            self.since_began(request.arrival_time),
        )

    def _encoded(self, output: SchedulerOutput) -> list[tuple[int, int]]:
        found = []
        for row, places in output.scheduled_encoder_inputs.items():
            items = self._requests[self._numbers[row]].encoder_inputs
            found.append((self._numbers[row], sum(items[place].num_tokens for place in places)))
        return found

    def _note_reasons(self, step_id: int) -> None:
        """Note, right after a step, why each waiting request waits, where that has changed."""
        self._is_to_ask = False
        numbers, told = self._numbers, self._reasons
        reasons = {
            numbers[request_id]: str(reason)
            for request_id, reason in self._scheduler().get_wait_reasons().items()
        }
        self._waits += [
            Waits(number, step_id, reason)
            for number, reason in reasons.items()
            if told.get(number) != reason
        ]
        self._reasons = reasons


def _numbers_of(
    request_ids: Sequence[str], numbers: Mapping[str, int], but: Sequence[str] = ()
) -> list[int]:
    return [numbers[i] for i in request_ids if i in numbers and i not in but]


def _without(numbers: list[int], others: list[int]) -> list[int]:
    gone = set(others)
    return [number for number in numbers if number not in gone]


FRAME_SECONDS = 1 / 15  # as often as an eye can follow
QUIET_SECONDS = 1.0  # between two frames while nothing happens
AWAY_SECONDS = 3.0  # a page that has not asked for this long has gone
SHADOW_SECONDS = 1.0  # between two tellings of the shadow
MAX_LEASES = 8  # of which a frame tells one by one
NUM_KEPT = 30  # frames, two seconds: for a page that was held up

_encoder = msgspec.json.Encoder()


class LiveFeed:
    """Broadcasts scheduler frames to the browsers that watch one engine; called on its loop."""

    def __init__(
        self,
        loop: EngineLoop,
        clock: Clock,
        metrics: EngineMetrics,
        config: Callable[[], EngineConfig],
        max_model_len: int,
    ) -> None:
        """`config` is asked each time: the policy may have changed."""
        self._loop = loop
        self._clock = clock
        self._metrics = metrics
        self._config = config
        self._max_model_len = max_model_len
        self._policies: dict[str, str] | None = None  # that are installed; read once
        self._options: dict[str, list[OptionField]] = {}  # by policy that declares some
        self._onlooker: FeedObserver | None = None
        self._unix_time = 0.0  # when that was put in its place, seconds since 1970
        self._loop_lag = LoopLag()
        self._frames: deque[tuple[int, bytes]] = deque(maxlen=NUM_KEPT)
        self._number = 0  # of the last frame
        self._gauges: Gauges
        self._next: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._num_looking = 0  # pages that wait for the next frame
        self._last_look = self._last_frame = self._last_shadow = 0.0
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether a page is taken to look."""
        return self._onlooker is not None

    async def look(self, after: int) -> Seen:
        """Return the frames after that number, at least one; a snapshot if they are not kept, and
        for 0. Raises `RequestError` where there is nothing to look at, and `EngineDeadError` when
        the engine ends.
        """
        if self._policies is None:
            self._options = await asyncio.to_thread(describe_options)
            self._policies = await asyncio.to_thread(describe_policies)
        self._last_look = self._clock()
        if self._is_closed:
            raise EngineDeadError("the engine is shutting down")
        if self._onlooker is None:
            self._open()
        elif after == self._number:
            await self._wait()
        onlooker = self._onlooker
        if onlooker is None:
            raise EngineDeadError("the engine is shutting down")
        if onlooker.error is not None:
            raise RequestError(f"watching the scheduler has failed: {onlooker.error!r}")
        if after and self._frames and self._frames[0][0] - 1 <= after < self._number:
            return Seen(self._number, [data for number, data in self._frames if number > after])
        self._make_frame(onlooker)  # what it tells is in the snapshot, and not in the next
        return Seen(self._number, [self._snapshot(onlooker, self._policies)])

    def close(self) -> None:
        """Refuse new viewers, as the engine ends. Idempotent."""
        self._is_closed = True
        self._take_away()

    def _take_away(self) -> None:
        if self._onlooker is not None:
            self._loop.observers.unsubscribe(self._onlooker)
        self._onlooker = self._metrics.latencies = None
        self._frames.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._wake()

    def _open(self) -> None:
        policy = innermost(self._loop.scheduler)
        if not isinstance(policy, BaseScheduler):
            raise RequestError(
                f"policy {type(policy).__name__} does not derive from BaseScheduler: what it does "
                "cannot be watched"
            )
        self._onlooker = FeedObserver(lambda: self._loop.scheduler, policy, self._clock)
        self._loop.observers.subscribe(self._onlooker)
        self._metrics.latencies = Latencies()
        self._unix_time = time.time()
        self._set_timer()

    async def _wait(self) -> None:
        """Wait until there is another frame, or an end."""
        self._num_looking += 1
        try:
            await asyncio.shield(self._next)
        finally:
            self._num_looking -= 1
            self._last_look = self._clock()

    def _wake(self) -> None:
        self._next.set_result(None)
        self._next = asyncio.get_running_loop().create_future()

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(FRAME_SECONDS, self._on_timer)

    def _on_timer(self) -> None:
        assert self._onlooker is not None
        now = self._clock()
        if not self._num_looking and now - self._last_look > AWAY_SECONDS:
            self._take_away()
            return
        is_quiet = not self._onlooker.has_events
        if not is_quiet or now - self._last_frame >= QUIET_SECONDS:
            self._make_frame(self._onlooker)
        self._set_timer()

    def _make_frame(self, onlooker: FeedObserver) -> None:
        self._number += 1
        self._last_frame = now = self._clock()
        shadow = None
        if now - self._last_shadow >= SHADOW_SECONDS:
            self._last_shadow = now
            shadow = self._shadow()
        self._gauges = self._measure(onlooker)
        frame = Frame(
            number=self._number,
            now=onlooker.since_began(self._clock()),
            events=onlooker.take_events(),
            gauges=self._gauges,
            shadow=shadow,
        )
        self._frames.append((self._number, _encoder.encode(frame)))
        self._wake()

    def _snapshot(self, onlooker: FeedObserver, policies: dict[str, str]) -> bytes:
        config = self._config()
        requests, rows = onlooker.picture()
        about = About(
            version=__version__,
            model=config.model.served_name,
            policy=config.scheduler.policy,
            options=config.scheduler.options,
            policies=policies,
            policy_options=self._options,
            is_simulated=config.runner.runner == "simulated",
            max_num_seqs=config.scheduler.max_num_seqs,
            num_blocks=onlooker.pool.num_blocks,
            block_size=config.cache.block_size,
            max_model_len=self._max_model_len,
            unix_time=self._unix_time,
        )
        snapshot = Snapshot(
            number=self._number,
            now=onlooker.since_began(self._clock()),
            about=about,
            requests=requests,
            rows=rows,
            gauges=self._gauges,
            shadow=self._shadow(),
        )
        return _encoder.encode(snapshot)

    def _measure(self, onlooker: FeedObserver) -> Gauges:
        num_running, num_waiting = self._loop.scheduler.get_request_counts()
        pool, latencies = onlooker.pool, self._metrics.latencies
        leases = onlooker.kv_cache.leases
        policy = innermost(self._loop.scheduler)
        first_tokens, gaps = ([], []) if latencies is None else latencies.take()
        return Gauges(
            loop_lag=round(1e3 * self._loop_lag(), 2),
            num_running=num_running,
            num_waiting=num_waiting,
            num_used_blocks=pool.num_used_blocks,
            num_leased_blocks=leases.num_held_blocks if leases else 0,
            num_leases=len(leases),
            leases=_leases(policy, onlooker),
            num_cached_blocks=pool.num_free_blocks - pool.num_unused_blocks,
            num_free_blocks=pool.num_unused_blocks,
            num_output_tokens=self._metrics.num_generation_tokens,
            step_limit=policy.step_limit if isinstance(policy, BaseScheduler) else 0,
            of_policy=policy.read_gauges() if isinstance(policy, BaseScheduler) else {},
            first_tokens=first_tokens,
            gaps=gaps,
        )

    def _shadow(self) -> Shadow | None:
        metrics, settings = self._metrics, self._config().shadow
        if settings.shadow_policy is None or (shadow := metrics.shadow.shadow) is None:
            return None
        stats = shadow.scheduler.make_stats()
        return Shadow(
            policy=settings.shadow_policy,
            bounds=list(metrics.request_latency.bounds),
            live=_histograms(metrics),
            shadow=_histograms(metrics.shadow),
            num_running=stats.num_running_reqs,
            num_waiting=stats.num_waiting_reqs,
            num_preemptions=stats.num_preemptions,
            num_resets=shadow.stats.num_resets,
            is_failed=shadow.stats.is_failed,
        )


def _leases(policy: SchedulerInterface, onlooker: FeedObserver) -> list[Lease]:
    """Return the newest leases, at most `MAX_LEASES`; empty for a scheduler of another kind."""
    if not isinstance(policy, BaseScheduler):
        return []
    size = policy.kv_cache.block_size
    return [
        Lease(user, shown_id(name), num_tokens // size, onlooker.since_began(until))
        for user, name, num_tokens, until in policy.memory.leases(MAX_LEASES)
    ]


def _histograms(metrics: EngineMetrics | ShadowMetrics) -> Histograms:
    return Histograms(
        first_token=list(metrics.time_to_first_token.counts),
        gap=list(metrics.inter_token_latency.counts),
        whole=list(metrics.request_latency.counts),
    )


# What an onlooker is told in place of the id of a request. A client that has the id may end the
# request, or open what it has answered.


# Ids that the server, its page or the engine has made end in 128 random bits. The first 32 find the
# line of the log and leave 96 that a reader would have to guess.
_MADE = re.compile(
    r"((?:chatcmpl-|cmpl-|embd-|msg_|page-|req-|resp_)[0-9a-f]{8})[0-9a-f]{24}((?:-[0-9]+)*)"
)

_KEY = secrets.token_bytes(16)  # of this process: an id cannot be found by trying out many


def shown_id(request_id: str) -> str:
    """Return a short name for it: the same for the same id, as long as the process lives."""
    made = _MADE.fullmatch(request_id)
    if made is not None:
        return made[1] + made[2]
    text = request_id.encode(errors="surrogatepass")
    return "own-" + blake2b(text, key=_KEY, digest_size=5).hexdigest()
