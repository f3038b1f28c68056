"""What an engine is doing at one moment, as plain data: it shows why an engine does not go on.

Knows where each part of an engine can be read. Changes nothing, and keeps nothing of the engine.
"""

from typing import Literal

import msgspec

from aioserve.engine.builder import EngineParts
from aioserve.engine.operations.command import State
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler import BaseScheduler, SchedulerInterface
from aioserve.scheduler.delegate import chain

RequestState = Literal["waiting", "preempted", "paused", "running"]

_STATES: dict[RequestStatus, RequestState] = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.PAUSED: "paused",
    RequestStatus.RUNNING: "running",
}


class RequestSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of a request that has not ended. What only a policy derived from `BaseScheduler`
    keeps is None under any other policy.
    """

    request_id: str  # of one of several samples: the request's, a hyphen and its number
    status: RequestState | None  # preempted: it lost its KV blocks; paused: it keeps them
    wait_reason: WaitReason | None  # why the last step did not serve it; None: it runs, or unknown
    user: str
    priority: int
    age: float  # seconds since it came
    has_reader: bool  # its outputs go to a stream that is open, here or in another process
    num_prompt_tokens: int
    num_computed_tokens: int | None  # of prompt and output, those of steps in flight included
    num_output_tokens: int | None
    num_kv_blocks: int | None  # that it holds
    num_preemptions: int | None


class StepSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A step that was handed to the runner and is not back."""

    step_id: int
    age: float  # seconds since it was handed over
    num_tokens: dict[str, int]  # that it computes, by request id; empty: it only tells of endings


class LeaseSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A cached prefix that the policy or its client keeps for the next turn of a conversation."""

    user: str  # the client's name
    conversation: str  # the hint `session` of its requests, else the id of the request
    num_blocks: int  # those that other leases or requests hold, too, included
    seconds_left: float  # until it ends, if it does not give way before; below 0: at the next step


class CacheSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The memory for keys, values and states, and what of it is held. Each block is used, cached or
    free.
    """

    num_blocks: int
    num_used_blocks: int  # that requests or leases hold
    num_leased_blocks: int  # that leases hold, and no request does
    leases: list[LeaseSnapshot]  # the newest first
    num_cached_blocks: int | None  # that no request holds, with a prefix that can be found again
    num_free_blocks: int | None  # that no request holds, without content
    num_state_slots: int | None  # None: the model's layers keep no states
    num_used_state_slots: int | None
    num_window_blocks: int | None  # None: no layer with a sliding window has blocks of its own
    num_used_window_blocks: int | None


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """An engine at one moment. It stays as it is when the engine goes on."""

    state: State
    policy: str  # the name of the policy that plans, as `scheduler.policy` has it
    policy_class: str  # the name of its class
    is_fallback: bool  # a plain policy plans in the place of the one that is set, which has failed
    watchers: list[str]  # the classes that record the scheduler, and those that observe its steps
    stalled_seconds: float  # for how long no request was served although some wait
    num_running: int
    num_waiting: int  # in the queue, or until their blocks have been read
    num_arriving: int  # being tokenized and checked: they are not in the queue yet
    num_arriving_tokens: int  # a lower bound of their prompts' tokens
    arriving_ids: list[str]  # those of them that have an id by now
    requests: list[RequestSnapshot]  # in the order in which they came
    reader_ids: list[str]  # the samples whose stream has not been told of an end
    ids_in_use: list[str]  # which no new request may take: of requests and of samples
    steps_in_flight: list[StepSnapshot]  # the oldest first: that one is computed
    cache: CacheSnapshot | None  # None: the policy tells no statistics


def take_snapshot(
    parts: EngineParts, policy: str, state: State, *, is_fallback: bool
) -> EngineSnapshot:
    """Look at `parts` between two of their steps. `policy` is the name of the one that plans."""
    core, arrivals, claims = parts.core, parts.arrivals, parts.claims
    *recorders, deciding = chain(core.loop.scheduler)
    now = parts.clock()
    num_running, num_waiting = deciding.get_request_counts()
    return EngineSnapshot(
        state=state,
        policy=policy,
        policy_class=core.loop.scheduler.policy.__name__,
        is_fallback=is_fallback,
        watchers=[
            type(watcher).__name__
            for watcher in (*recorders, *core.loop.observers)
            if watcher is not parts.output_processor
        ],
        stalled_seconds=core.loop.stalled_seconds(),
        num_running=num_running,
        num_waiting=num_waiting,
        num_arriving=arrivals.num_arriving,
        num_arriving_tokens=arrivals.num_tokens,
        arriving_ids=claims.arriving_ids(),
        requests=_requests(parts, deciding, now),
        reader_ids=parts.output_processor.reader_ids(),
        ids_in_use=claims.ids(),
        steps_in_flight=[
            StepSnapshot(
                step_id=step.output.step_id,
                age=now - step.since,
                num_tokens=dict(step.output.num_scheduled_tokens),
            )
            for step in core.loop.in_flight
        ],
        cache=_cache(deciding, now),
    )


def _requests(
    parts: EngineParts, deciding: SchedulerInterface, now: float
) -> list[RequestSnapshot]:
    """Return those that the scheduler has; if it cannot be asked, those that have a reader."""
    output_processor, reasons = parts.output_processor, deciding.get_wait_reasons()
    is_known = isinstance(deciding, BaseScheduler)
    requests: list[Request] = []
    if isinstance(deciding, BaseScheduler):
        requests = deciding.get_requests()
    else:
        readers = map(output_processor.reader_of, output_processor.reader_ids())
        requests = [reader.request for reader in readers if reader is not None]
    return [
        RequestSnapshot(
            request_id=request.request_id,
            status=_STATES.get(request.status) if is_known else None,
            wait_reason=reasons.get(request.request_id),
            user=request.user,
            priority=request.priority,
            age=now - request.arrival_time,
            has_reader=output_processor.reader_of(request.request_id) is not None,
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens if is_known else None,
            num_output_tokens=request.num_output_tokens if is_known else None,
            num_kv_blocks=len(request.block_ids) if is_known else None,
            num_preemptions=request.num_preemptions if is_known else None,
        )
        for request in requests
    ]


def _cache(deciding: SchedulerInterface, now: float) -> CacheSnapshot | None:
    if (stats := deciding.make_stats()) is None:
        return None
    num_cached = num_free = None
    leases: list[LeaseSnapshot] = []
    if isinstance(deciding, BaseScheduler):
        leases = [
            LeaseSnapshot(
                user=held.user,
                conversation=held.conversation,
                num_blocks=held.num_tokens // deciding.kv_cache.block_size,
                seconds_left=held.until - now,
            )
            for held in deciding.memory.leases()
        ]
        pool = deciding.kv_cache.pool
        num_free = pool.num_unused_blocks
        num_cached = pool.num_free_blocks - num_free
    has_states, has_windows = stats.num_state_slots > 0, stats.num_window_blocks > 0
    num_used_slots = stats.num_state_slots - stats.num_free_state_slots
    return CacheSnapshot(
        num_blocks=stats.num_kv_blocks,
        num_used_blocks=stats.num_used_kv_blocks,
        num_leased_blocks=stats.num_leased_kv_blocks,
        leases=leases,
        num_cached_blocks=num_cached,
        num_free_blocks=num_free,
        num_state_slots=stats.num_state_slots if has_states else None,
        num_used_state_slots=num_used_slots if has_states else None,
        num_window_blocks=stats.num_window_blocks if has_windows else None,
        num_used_window_blocks=stats.num_used_window_blocks if has_windows else None,
    )
