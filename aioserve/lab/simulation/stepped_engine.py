"""An engine without tasks: the same scheduler, KV cache and step times, moved on from outside.

Drives the step loop that the server's engine task drives. `MultiStepDecode` plans many steps of
decodes at once.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec

from aioserve.config import EngineConfig
from aioserve.engine.builder import fit_max_model_len, make_kv_cache, with_runner
from aioserve.engine.step_loop import StepLoop
from aioserve.fleet.routing import ReplicaReport, StepTimes
from aioserve.kv_cache import KVCacheManager, KVEvent
from aioserve.lab.simulation.outcome import RunObserver
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import EngineCoreOutput, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.runner.simulated import SimulatedRunner
from aioserve.runner.step_times import step_times
from aioserve.scheduler import BaseScheduler, SchedulerInterface, SchedulerOutput, load_policy
from aioserve.scheduler.blame import blamed

# Many pure-decode steps planned at once, for policies that declare `keeps_decoding`: with the books
# of `Step.run_decodes`, `Step.output` and `take_results`, in the same order.


class MultiStepDecode:
    """The steps that follow a step of decodes which is alone in flight: the same rows again."""

    def __init__(self, scheduler: BaseScheduler) -> None:
        """`follows` must have been true of this scheduler's newest step."""
        self._scheduler = scheduler
        self._book = scheduler.book
        self._kv_cache = scheduler.kv_cache
        self.requests: list[Request] = scheduler.book.in_flight[0][1]

    @staticmethod
    def is_promised_by(policy: type[SchedulerInterface]) -> bool:
        """Return whether this class promises `keeps_decoding`: not one that plans or counts
        otherwise than the base that does, nor one that learns from every step.
        """
        if not issubclass(policy, BaseScheduler):
            return False
        if policy.uses_step_time or policy.wants_row_values or policy.sets_frequency:
            return False
        for cls in policy.__mro__:
            if "keeps_decoding" in vars(cls):
                return bool(vars(cls)["keeps_decoding"])
            if not vars(cls).keys().isdisjoint(("schedule", "update_from_output")):
                return False
        return False

    @staticmethod
    def follows(scheduler: BaseScheduler, output: SchedulerOutput) -> bool:
        """Return whether the steps after this one, just planned, are the same until a request
        arrives or ends or blocks run out. The policy must declare `keeps_decoding`; no lookahead.
        The caller knows how many steps bring no stop token, since a scheduler cannot know it.
        """
        book, num_rows = scheduler.book, len(output.num_scheduled_tokens)
        return (
            num_rows == output.total_num_scheduled_tokens
            and num_rows == len(output.scheduled_cached_reqs.req_ids)
            and num_rows == len(book.running)
            and not book.waiting
            and len(book.in_flight) == 1
            and not output.scheduled_spec_decode_tokens
            and not any(resource.plans_decodes for resource in scheduler.kv_cache.resources)
            and all(
                r.num_computed_tokens == r.num_tokens and r.pooling_params is None
                for r in book.in_flight[0][1]
            )
        )

    def num_steps(self, limit: int) -> int:
        """Return how many more steps, at most `limit`, can be planned before a step that ends a
        request or lacks blocks.
        """
        count = min([limit, *(r.max_total_tokens - r.num_tokens - 1 for r in self.requests)])
        while count > 0 and self._num_missing(count) > self._kv_cache.pool.num_free_blocks:
            count //= 2
        return count

    def go_on(self, token_ids: Sequence[Sequence[int]]) -> None:
        """The step in flight has come back, and those after it but the last, which is in flight in
        its place, as the same output. `token_ids` are what they brought, by row, one a step.
        Raises `PolicyError` if the policy cannot count them.
        """
        count, size = len(token_ids[0]), self._kv_cache.block_size
        growing: list[tuple[int, Request, int]] = []  # step, request, its computed tokens before
        for request, tokens in zip(self.requests, token_ids, strict=True):
            computed = request.num_computed_tokens
            first = request.num_slots - computed + 1  # the first step for which there is no slot
            for step in range(first, count + 1, size):
                growing.append((step, request, computed + step - 1))
            request.token_ids += tokens
            request.num_tokens += count
            request.num_computed_tokens = end = computed + count
            request.num_target_tokens = min(end + 1, request.max_total_tokens - 1)
        growing.sort(key=itemgetter(0))  # stable: within a step in the order of the rows
        for _, request, num_computed in growing:
            self._kv_cache.cache_full_blocks(request, num_computed)
            self._kv_cache.grow(request, 1)
        self._book.count_decodes(count, len(self.requests))
        with blamed(type(self._scheduler), "decoded_on()"):
            self._scheduler.decoded_on(self.requests, count)

    def _num_missing(self, count: int) -> int:
        """KV blocks that `count` more steps take."""
        size = self._kv_cache.block_size
        return sum(
            max(-(-(r.num_computed_tokens + count) // size) - len(r.block_ids), 0)
            for r in self.requests
        )


# An engine without tasks: it drives the step loop that the server's engine task drives.


# Steps of decodes that are planned together: more are cut short by arrivals, fewer do not pay.
MIN_AHEAD, MAX_AHEAD = 2, 128
KEPT = 0.9  # weight of the mean of step times beside the newest step: ten steps, about


class Blueprint:
    """The parts that equal engines have in common, read and checked once."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises `ConfigError` for what cannot work."""
        self.config = config
        self.model_info = ModelInfo(config.model)
        self._step_time = step_times(config.runner)
        self.policy = load_policy(config.scheduler.policy)
        self.runner_info = self.make_runner().info
        self.config = with_runner(config, self.runner_info)
        num_slots = self.runner_info.num_kv_blocks * config.cache.block_size
        self.max_model_len = fit_max_model_len(
            config.model, self.model_info.max_model_len, num_slots
        )

    @property
    def max_request_tokens(self) -> int:
        """Tokens that prompt and reply of a request may have together: what the model and the KV
        pool hold. The last token of a reply takes no room, since it is never computed.
        """
        info, cache = self.runner_info, self.config.cache
        return min(self.max_model_len, info.num_kv_blocks * cache.block_size + 1)

    def make_runner(self) -> SimulatedRunner:
        """Return a new simulated runner; each engine has its own."""
        return SimulatedRunner(self.config, self.model_info, step_time=self._step_time)

    def make_kv_cache(self, *, record_events: bool = False) -> KVCacheManager:
        """Return a new KV cache; each engine has its own."""
        return make_kv_cache(self.config.cache, self.runner_info, record_events=record_events)

    def make_scheduler(
        self, kv_cache: KVCacheManager, clock: Callable[[], float]
    ) -> SchedulerInterface:
        """Return a new scheduler on `kv_cache`. Raises `PolicyError` if the policy raises."""
        make_policy: Callable[..., SchedulerInterface] = self.policy
        with blamed(self.policy, "__init__()"):
            return make_policy(
                self.config.scheduler, kv_cache, max_model_len=self.max_model_len, clock=clock
            )


def resumed(request: Request) -> Request:
    """Return the request with the tokens that it has, before an engine has seen it."""
    spec = msgspec.structs.replace(request.spec, output_token_ids=request.output_token_ids)
    return Request(spec)


class _Stretch(NamedTuple):
    """Decode steps that are planned in one go, without a call of the policy for each."""

    decodes: MultiStepDecode
    ends: list[float]  # of the step in flight, and of each after it; the last is planned as usual


class _Result(NamedTuple):
    """The result that the simulated runner has of a step, before it is back."""

    output: ModelRunnerOutput
    end: float


class SteppedEngine:
    """An engine that is moved on by `turn`, at the time that the last one returned, or when a
    request came to an engine that had nothing to do. Times are those of `clock`, in seconds.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        observer: RunObserver,
        clock: Callable[[], float],
        *,
        record_events: bool = False,
    ) -> None:
        self.runner = blueprint.make_runner()
        self.runner.on_step = observer.note
        self.observer = observer
        self.busy_seconds = 0.0
        self.step_seconds = 0.0  # mean of the newest steps
        self._step_times = StepTimes()
        #: Ids of requests of which nothing has come back yet.
        self.unstarted: set[str] = set()
        #: Ids of requests that the policy has rejected, until the caller takes them.
        self.rejected: list[str] = []
        self._kv_cache = blueprint.make_kv_cache(record_events=record_events)
        settings = blueprint.config.scheduler
        self._max_num_seqs = settings.max_num_seqs
        self._scheduler = blueprint.make_scheduler(self._kv_cache, clock)
        self._loop: StepLoop[_Result] = StepLoop(
            self._scheduler,
            depth=settings.depth,
            clock=clock,
            stall_timeout=settings.stall_timeout,
            raises=True,
        )
        self._loop.wake = self._on_wake
        self._clock = clock
        self._last_end = 0.0
        self._is_woken = False  # a request came or went while steps were with the runner
        self._stretch: _Stretch | None = None
        self._goes_on = (
            MultiStepDecode.is_promised_by(blueprint.policy)
            and settings.depth == 1
            and not settings.num_lookahead_tokens
            and not blueprint.config.runner.simulated_draft_tokens
            and not self.runner.has_jitter
        )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is with the runner."""
        return not self._loop.in_flight

    @property
    def load(self) -> tuple[int, int, float]:
        """How many run, how many wait, and the share of blocks that are held."""
        pool = self._kv_cache.pool
        return *self._scheduler.get_request_counts(), pool.num_used_blocks / pool.num_blocks

    def report(self) -> ReplicaReport:
        """Return what a replica tells a router of itself."""
        stats, pool = self._scheduler.make_stats(), self._kv_cache.pool
        num_running, num_waiting = self._scheduler.get_request_counts()
        size = self._kv_cache.block_size
        base, each = self._step_times.line()
        scheduler = self._scheduler
        adapters = scheduler.running_adapters if isinstance(scheduler, BaseScheduler) else ()
        return ReplicaReport(
            num_running,
            num_waiting,
            0 if stats is None else stats.num_waiting_tokens,
            self._max_num_seqs,
            pool.num_blocks * size,
            pool.num_free_blocks * size,
            self.step_seconds,
            base,
            each,
            (pool.num_free_blocks - pool.num_unused_blocks) * size,
            tuple(sorted(adapters)),
            0 if stats is None else stats.num_leased_kv_blocks * size,
        )

    def catch_up(self) -> float | None:
        """Do the steps that have ended by now, before the caller asks or changes anything; when to
        call `turn` then, if that has changed.
        """
        stretch, self._stretch = self._stretch, None
        if stretch is None:
            return None
        decodes, ends = stretch
        count = min(bisect_left(ends, self._clock()), len(ends) - 1)
        if count:
            step = self._loop.in_flight[0]
            result = step.handle.output
            tokens = self.runner.decode_on(result.req_ids, count)
            decodes.go_on(
                [
                    [*first, *others[:-1]]
                    for first, others in zip(result.sampled_token_ids, tokens, strict=True)
                ]
            )
            result = ModelRunnerOutput(result.req_ids, [[others[-1]] for others in tokens])
            step.handle = _Result(result, ends[count])
            self.runner.be_busy_until(ends[count])
            self.observer.note_decodes(ends[: count + 1], len(tokens))
            self.busy_seconds += ends[count] - ends[0]
            self._note_seconds(len(tokens), (ends[count] - ends[0]) / count, count)
            self._last_end = ends[count]
        return ends[count]

    def add_request(self, request: Request) -> None:
        """Add a request. Raises what the scheduler raises."""
        self._loop.add_request(request)
        self.unstarted.add(request.request_id)

    def has_room_for(self, request: Request) -> bool:
        """Return whether its KV cache could take in the blocks of a request of another engine
        now.
        """
        num_slots = (request.num_tokens - 1) // self._kv_cache.block_size
        return num_slots < self._kv_cache.pool.num_free_blocks

    def release(self, request_id: str) -> Request:
        """Drop a request that goes on elsewhere; returns what is known of it, without blocks. A
        token that a step in flight brings is computed again.
        """
        scheduler = self._scheduler
        assert isinstance(scheduler, BaseScheduler)
        kept = resumed(scheduler.book.requests[request_id])
        self._loop.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
        self.unstarted.discard(request_id)
        return kept

    def take_in(self, request: Request) -> None:
        """Go on with a request of another engine whose KV blocks have come: its full blocks are
        cached here, if there is room, and the tokens behind them are computed. Raises what the
        scheduler raises.
        """
        cache, carrier = self._kv_cache, resumed(request)
        num_slots = (request.num_tokens - 1) // cache.block_size * cache.block_size
        found = cache.get_computed_blocks(carrier)
        if num_slots and cache.can_admit(found, num_slots, is_alone=False, gone=None):
            cache.admit(carrier, found, num_slots)
            carrier.num_computed_tokens = num_slots
            cache.cache_full_blocks(carrier)
            cache.free(carrier)
        self._loop.add_request(request)

    def turn(self) -> tuple[list[EngineCoreOutput], float | None]:
        """Take the step that is back, if one was out, and hand over the next. Returns what came of
        it that the caller wants to know, first tokens and ends, and when to call again;
        None: when a request comes. Raises `PolicyError`.
        """
        self.catch_up()
        is_woken, self._is_woken = self._is_woken, False
        loop = self._loop
        outputs = self._take() if loop.in_flight else []
        for step in loop.fill():
            now = self._clock()
            step.handle = _Result(*self.runner.run_step(step.told, now))
            seconds = step.handle.end - max(now, self._last_end)
            self.busy_seconds += seconds
            self._note_seconds(len(step.handle.output.req_ids), seconds, 1)
            self._last_end = step.handle.end
        while loop.failed:  # rejected: other failures are raised
            rejected, _ = loop.failed.pop()
            self.rejected += rejected or ()
            self.unstarted.difference_update(rejected or ())
        if loop.in_flight:
            return outputs, self._look_ahead()
        idle = loop.idle_seconds()
        if idle is not None:  # the policy holds a request back
            return outputs, self._clock() + (0.0 if is_woken else idle)
        return outputs, None

    def take_events(self) -> list[KVEvent]:
        """Return the events of the KV cache since the last call, if it records."""
        return self._kv_cache.take_events()

    def next_expiry(self) -> float | None:
        """Return when the next deadline passes: the time to call `expire`."""
        return self._scheduler.next_expiry()

    def expire(self) -> list[str]:
        """Return the ids of those whose deadline has passed: they have ended."""
        expired = self._loop.expire_requests()
        self.unstarted.difference_update(expired)
        return expired

    def _note_seconds(self, batch: int, seconds: float, count: int) -> None:
        """Take `count` steps of `batch` requests, each of which took `seconds`, into the mean."""
        self._step_times.learn(batch, seconds, count)
        kept = KEPT**count if self.step_seconds else 0.0
        self.step_seconds = kept * self.step_seconds + (1.0 - kept) * seconds

    def _on_wake(self) -> None:
        """A request came or ended: if steps are with the runner, the turn after them is early."""
        self._is_woken = not self.is_idle

    def _look_ahead(self) -> float:
        """Return when to turn: at the end of the step in flight, or of many that only decode."""
        step = self._loop.in_flight[0]
        plan, end = step.output, step.handle.end
        scheduler = self._scheduler
        if not self._goes_on or self.unstarted or not isinstance(scheduler, BaseScheduler):
            return end
        if not MultiStepDecode.follows(scheduler, plan):
            return end
        decodes = MultiStepDecode(scheduler)
        ends_after = self.runner.num_steps_before_ends(step.handle.output.req_ids)
        count = min(decodes.num_steps(MAX_AHEAD), ends_after)
        if count < MIN_AHEAD:
            return end
        num_rows = plan.total_num_scheduled_tokens
        num_context = sum(plan.scheduled_cached_reqs.num_computed_tokens) + num_rows
        ends = self.runner.ends_of_decodes(num_rows, num_context, count)
        self._stretch = _Stretch(decodes, ends)
        return ends[-1]

    def _take(self) -> list[EngineCoreOutput]:
        step = self._loop.in_flight[0]
        by_client = self._loop.take(step.handle.output)
        unstarted = self.unstarted
        if not (unstarted or self._scheduler.has_finished_requests()) or not by_client:
            return []  # one more token for each request: most steps bring nothing else
        outputs = [
            output
            for output in by_client[0].outputs
            if output.finish_reason is not None or output.request_id in unstarted
        ]
        unstarted.difference_update([output.request_id for output in outputs])
        return outputs
