"""The engine's step loop without IO: plan, hand over, take back, stall, expire, fail and blame.

The asyncio engine, the simulator of fleets, the contract harness and the shadow all drive this one
object, so what is simulated is what is served. It waits for nothing and reads no clock but the one
that it is given: a driver hands each step to a runner, brings the result back, and says when.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import msgspec

from aioserve.config import SchedulerConfig
from aioserve.errors import (
    FROM_OUTSIDE,
    AioserveError,
    GrammarLimitError,
    PolicyError,
    RequestRejectedError,
    StalledError,
    place_of,
)
from aioserve.outputs import EngineCoreOutputs, FinishReason, ModelRunnerOutput
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler import FAILURES_UNTIL_FALLBACK, SchedulerInterface, SchedulerOutput
from aioserve.scheduler.blame import as_policy_error, blamed, describe_result

logger = logging.getLogger(__name__)

#: What an observer, or what turns one request's tokens into text, may raise without harm to others.
FAULTS = (Exception, asyncio.CancelledError, SystemExit)

LOG_SECONDS = 1.0  # between two lines about the same culprit


class FailureLog:
    """The log of what fails in one engine. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._throttles: dict[str, _Throttle] = {}

    def log(self, culprit: str, error: BaseException) -> None:
        """A line with a traceback, unless there was one about the same culprit just now."""
        throttle = self._throttles.setdefault(culprit, _Throttle())
        num_held = throttle.let_through(self._clock())
        if num_held is not None:
            since = f" ({num_held} more were not logged)" if num_held else ""
            logger.error("%s failed: %s%s", culprit, error, since, exc_info=error)

    def announce(self, message: str) -> None:
        """Log in a line what follows from failures of the policy."""
        logger.error("%s", message)


class _Throttle:
    """Lets something through once in `LOG_SECONDS`, and counts what it held back."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._num_held = 0

    def let_through(self, now: float) -> int | None:
        """Return how many were held back since the last one; None: hold this one back, too."""
        if now - self._last < LOG_SECONDS:
            self._num_held += 1
            return None
        num_held, self._num_held, self._last = self._num_held, 0, now
        return num_held


# What the engine's step loop tells its observers: five events and the end of a turn. Whatever
# follows the engine (page, traces, shadow, metrics, KV events) derives from `StepObserver` and
# overrides what it wants to hear. An event that no observer overrides costs one look at an empty
# tuple. Knows nothing about what observers do with an event.


class StepObserver:
    """Base class of what follows an engine. Each method is called on the engine's loop; `now` is
    the time of the engine's clock, in seconds. An observer changes nothing in what it is shown.
    """

    #: What the observer raised: it hears nothing from then on. None: it works.
    error: BaseException | None = None

    def on_added(self, request: Request, now: float) -> None:
        """The scheduler has accepted a request."""

    def on_planned(self, output: SchedulerOutput, now: float) -> None:
        """A step was planned and, if it carries anything, handed to the runner."""

    def on_back(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        """A step is back, and the scheduler has taken its result."""

    def on_ended(self, request_ids: list[str], reason: FinishReason, now: float) -> None:
        """Requests have ended, for one and the same reason."""

    def on_switched(self, settings: SchedulerConfig, now: float) -> None:
        """The policy of `settings` plans from now on."""

    def on_turn_end(self, now: float) -> None:
        """What the last steps brought is delivered, and the next step computes, if there is one."""


class Observers:
    """The observers of one engine, by event. Each attribute is what has to be called for an event:
    a tuple that is empty while no observer overrides the method of that name.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._all: list[StepObserver] = []
        self._gather()

    def __iter__(self) -> Iterator[StepObserver]:
        """Return the observers, in the order in which they subscribed."""
        return iter(self._all)

    def subscribe(self, observer: StepObserver) -> None:
        """Tell the observer of every event from now on. Raises `TypeError` for what is none."""
        if not isinstance(observer, StepObserver):
            raise TypeError(f"an observer is a StepObserver, got {observer!r:.100}")
        self._all = [*self._all, observer]
        self._gather()

    def unsubscribe(self, observer: StepObserver) -> None:
        """Tell the observer nothing any more. Idempotent."""
        self._all = [other for other in self._all if other is not observer]
        self._gather()

    def tell(self, methods: tuple[Callable[..., None], ...], *args: Any) -> None:
        """Call the methods of one event, with the time as the last argument. An observer that
        raises is told nothing any more, since what follows would not fit what it knows; no request
        is lost over it.
        """
        if not methods:
            return
        now = self._clock()
        for method in methods:
            try:
                method(*args, now)
            except FAULTS as error:
                observer: StepObserver = method.__self__  # type: ignore[attr-defined]
                observer.error = error
                self.unsubscribe(observer)
                name = type(observer).__name__
                logger.error("%s failed and hears no more: %r", name, error, exc_info=error)

    def tell_ended(self, request_ids: list[str], status: RequestStatus) -> None:
        """Tell observers that the requests of `request_ids`, perhaps none, have ended."""
        if request_ids:
            self.tell(self.ended, request_ids, status.finish_reason or FinishReason.ERROR)

    def tell_ends(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Some of these outputs, by client, are the last of their requests."""
        ended: dict[FinishReason, list[str]] = {}
        for client_outputs in outputs.values():
            for output in client_outputs.outputs:
                if output.finish_reason is not None:
                    ended.setdefault(output.finish_reason, []).append(output.request_id)
        for reason, request_ids in ended.items():
            self.tell(self.ended, request_ids, reason)

    def _gather(self) -> None:
        self.added = self._overriding("on_added")
        self.planned = self._overriding("on_planned")
        self.back = self._overriding("on_back")
        self.ended = self._overriding("on_ended")
        self.switched = self._overriding("on_switched")
        self.turn_end = self._overriding("on_turn_end")

    def _overriding(self, name: str) -> tuple[Callable[..., None], ...]:
        own = getattr(StepObserver, name)
        return tuple(
            getattr(observer, name)
            for observer in self._all
            if getattr(type(observer), name) is not own
        )


# The half of the step loop that asks the policy, and tells its faults from those of aioserve. Says
# which requests end when a policy fails, and lets a plain policy plan once it has failed too often
# in a row. Knows no step in flight and no runner.


Outputs = dict[int, EngineCoreOutputs]  # by client index


class PolicyFailures:
    """The failures of the policies of one engine, counted since its start."""

    def __init__(self) -> None:
        self.count = 0
        self.first: Exception | None = None
        #: What the policy did wrong in its last step, and when; None: its last step worked.
        self.last: tuple[Exception, float] | None = None
        #: The failure after which the fallback took the policy's place; None: the policy plans.
        self.replaced_after: Exception | None = None
        self.num_in_row = 0
        self._last_step_id = 0  # the newest step that had been planned at the last failure

    @property
    def are_too_many(self) -> bool:
        """Whether another policy has to plan: this one has failed too often in a row."""
        return self.num_in_row >= FAILURES_UNTIL_FALLBACK

    def note(self, error: Exception, now: float, step_id: int) -> None:
        """The policy has failed at the time `now`, when `step_id` was the newest step."""
        self.last = error, now
        self.first = self.first or error
        self.count += 1
        self.num_in_row += 1
        self._last_step_id = step_id

    def note_success(self, step_id: int) -> None:
        """A step is back, and the policy has taken its result. Of a step that was planned before
        the last failure it proves nothing about what the policy does since.
        """
        self.last = None
        if step_id > self._last_step_id:
            self.num_in_row = 0

    def forgive(self) -> None:
        """Another policy plans, which an operator has chosen: it begins without failures."""
        self.last = self.replaced_after = None
        self.num_in_row = 0


class PolicyGuard:
    """The scheduler of one engine while its policy may fail: with an error, by ending requests
    itself, or by a result that is none. With `raises` a failure is raised and nothing goes on.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        clock: Callable[[], float],
        fallback: SchedulerConfig | None,
        *,
        raises: bool,
    ) -> None:
        """`clock` returns seconds. `fallback`: settings of the policy that plans once this one has
        failed too often in a row; None: all requests end then.
        """
        self.scheduler = scheduler
        self.observers = Observers(clock)
        self.failures = PolicyFailures()
        self.log = FailureLog(clock)
        #: Requests whose step or policy has failed (None: any that has ended), or which it has
        #: rejected, and why. The driver tells their readers, after the tokens of the same turn, and
        #: clears the list.
        self.failed: list[tuple[list[str] | None, BaseException]] = []
        #: Called when something has happened that a driver which waits must not sleep over.
        self.wake: Callable[[], None] = lambda: None
        self._clock = clock
        self._fallback = fallback
        self._raises = raises
        self._last_step_id = 0  # of the last step that was planned

    def add_request(self, request: Request) -> None:
        """Queue a request; raises what the scheduler raises. A policy that cannot put the request
        in order has failed as in a step: `PolicyError`, or the fallback takes the request.
        """
        try:
            with blamed(self.scheduler.policy, "add_request()"):
                self.scheduler.add_request(request)
        except PolicyError as error:
            if self._raises or not (self._note_failure(error) and self._fall_back(error)):
                raise
            self.scheduler.add_request(request)
        self.observers.tell(self.observers.added, request)
        self.wake()

    def _schedule(self) -> SchedulerOutput | None:
        """Ask the policy. If it fails, the requests of that step do, and the engine goes on."""
        num_before = self.scheduler.get_num_unfinished_requests()
        try:
            output = self.scheduler.schedule()
            if not isinstance(output, SchedulerOutput) or output.step_id <= self._last_step_id:
                raise PolicyError(
                    f"policy {self._policy}: schedule() must return the output() of a new step, "
                    f"got {describe_result(output)}{place_of(self.scheduler.policy, 'schedule')}"
                )
        except FROM_OUTSIDE:
            raise
        except BaseException as error:
            self._discard(as_policy_error(error, self.scheduler.policy, "schedule()"), num_before)
            return None
        if (num_missing := num_before - self.scheduler.get_num_unfinished_requests()) > 0:
            what = (
                f"schedule() has ended {num_missing} requests: it plans, and the engine ends them"
            )
            self._blame(None, PolicyError(f"policy {self._policy}: {what}"))
        return output

    def _update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> Outputs:
        observers, scheduler = self.observers, self.scheduler
        num_before = scheduler.get_num_unfinished_requests() if observers.ended else 0
        try:
            outputs = scheduler.update_from_output(output, result)
            if not isinstance(outputs, dict):
                raise PolicyError(
                    f"policy {self._policy}: update_from_output() must return what the method of "
                    f"its base class returns, got {outputs!r:.100}"
                )
        except FROM_OUTSIDE:
            raise
        except BaseException as error:
            failure = as_policy_error(error, scheduler.policy, "update_from_output()")
            if self._raises:
                raise failure from error
            # How far it came is unknown: every request of the step ends, and those that the policy
            # has ended without a word hear of it, too. The step is back in any case.
            carried = scheduler.abandon_step(output)
            self._finish(carried, RequestStatus.FINISHED_ERROR)
            self._blame(list(output.num_scheduled_tokens), failure)
            return {}
        self.failures.note_success(output.step_id)
        observers.tell(observers.back, output, result)
        # In most steps no request ends, and then none has to be looked for.
        if observers.ended and num_before != scheduler.get_num_unfinished_requests():
            observers.tell_ends(outputs)
        return outputs

    # Which side is at fault: the policy or aioserve.

    @property
    def _policy(self) -> str:
        return self.scheduler.policy.__name__

    def _discard(self, error: Exception, num_before: int) -> None:
        """A step was not planned after all; `num_before` requests were there before it."""
        if self._raises:
            raise error
        failed = self.scheduler.discard_step(self._last_step_id)
        self.observers.tell_ended(failed, RequestStatus.FINISHED_ERROR)
        # Requests that the policy itself has ended hear of it, too: their clients wait.
        are_all_told = num_before - len(failed) == self.scheduler.get_num_unfinished_requests()
        self._blame(failed if are_all_told else None, error)

    def _blame(self, request_ids: list[str] | None, error: Exception) -> None:
        """The policy has failed: these requests hear of it if they have ended, None: all that have.
        The others are planned again at once, by the fallback if the policy has failed too often.
        """
        if self._raises:
            raise error
        if self._note_failure(error) and not self._fall_back(error):
            self._finish(None, RequestStatus.FINISHED_ERROR)
            request_ids = None
        self.failed.append((request_ids, error))
        if self.scheduler.has_unfinished_requests():
            self.wake()

    def _note_failure(self, error: Exception) -> bool:
        """Return whether the policy has failed too often by now."""
        self.failures.note(error, self._clock(), self._last_step_id)
        self.log.log(f"policy {self._policy}", error)
        return self.failures.are_too_many

    def _fall_back(self, error: Exception) -> bool:
        """Let the fallback plan from now on. False if that cannot be, or did not help."""
        policy, count = self._policy, self.failures.num_in_row
        self.failures.num_in_row = 0
        if self._fallback is None or self.failures.replaced_after is not None:
            return False
        try:
            self._switch(self._fallback)
        except AioserveError as refusal:
            self.log.log(f"the fallback for policy {policy}", refusal)
            return False
        self.failures.replaced_after = error
        self.log.announce(
            f"policy {policy} has failed {count} times in a row: a plain policy, first come first "
            "served, plans in its place until a policy is chosen anew (POST /admin/policy)"
        )
        return True

    # What observers hear of, too.

    def _switch(self, settings: SchedulerConfig) -> None:
        self.scheduler = self.scheduler.switch(settings)
        self.observers.tell(self.observers.switched, settings)

    def _finish(self, request_ids: Iterable[str] | None, status: RequestStatus) -> list[str]:
        ended = self.scheduler.finish_requests(request_ids, status)
        self.observers.tell_ended(ended, status)
        return ended


# A policy that holds every request back is asked again after this many seconds even if nothing
# happened: long enough to cost nothing, short enough to be unnoticed. A guess.
IDLE_POLL_SECONDS = 0.01

_NONE: tuple[list[str], list[str]] = ([], [])

T = TypeVar("T")


class StepInFlight(Generic[T]):
    """A step that was planned. `handle` is the driver's: what it knows of the step's result."""

    __slots__ = ("handle", "output", "since", "told")

    handle: T

    def __init__(self, output: SchedulerOutput, told: SchedulerOutput, since: float) -> None:
        self.output = output
        self.told = told  # what the runner is to be given: the plan, and ends that it may not know
        self.since = since  # when it was planned, in seconds of the loop's clock


class StepLoop(PolicyGuard, Generic[T]):
    """The cycle of one engine. A turn of the driver: `take` the oldest step's result, or `fail` all
    steps; hand over each step of `fill`; deliver the outputs; tell what is in `failed`.

    No method waits. All are called from one thread, so a call sees a consistent scheduler and
    leaves one.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        *,
        depth: int,
        clock: Callable[[], float],
        stall_timeout: float = math.inf,
        fallback: SchedulerConfig | None = None,
        raises: bool = False,
    ) -> None:
        """`depth` is how many steps are in flight at most; `clock` is the scheduler's, and
        `stall_timeout` in its seconds. `fallback` is by which settings a step is planned once the
        policy has failed too often in a row; None: all requests end then. With `raises`, as in a
        simulation, a failure of the policy is raised as `PolicyError`, and nothing goes on.
        """
        super().__init__(scheduler, clock, fallback, raises=raises)
        #: The steps that are with the runner, the oldest first.
        self.in_flight: deque[StepInFlight[T]] = deque()
        #: Since when the runner has been at the oldest of them, about; other threads may read it.
        self.step_since = 0.0
        self.is_paused = False  # no further step is planned
        self._depth = depth
        self._stall_timeout = stall_timeout
        self._connector = scheduler.get_kv_connector()
        self._stalled_since: float | None = None
        # Ids that have finished or were preempted: to be told again, told with a step in flight.
        self._untold = self._retold = _NONE

    # What clients and operators cause.

    def finish_requests(
        self, request_ids: Iterable[str] | None, status: RequestStatus
    ) -> list[str]:
        """End requests, all of them if None; returns the ids that have ended by this. Their blocks
        return at once, or when the step in flight is back.
        """
        ended = self._finish(request_ids, status)
        self.wake()
        return ended

    def expire_requests(self) -> list[str]:
        """End the requests whose deadline or queue timeout has passed; returns their ids. Never to
        be called between a step's result and its delivery.
        """
        ended = self.scheduler.expire_requests()
        if ended:
            self.observers.tell_ended(ended, RequestStatus.FINISHED_TIMEOUT)
            self.wake()
        return ended

    def switch(self, settings: SchedulerConfig) -> None:
        """Let the policy of `settings` plan from now on; what the last policy did wrong is
        forgotten. Raises what the scheduler raises; nothing has changed then.
        """
        self._switch(settings)
        self.failures.forgive()
        self.wake()

    def pause(self) -> None:
        """Plan no further step. Idempotent."""
        self.is_paused, self._stalled_since = True, None
        self.wake()

    def resume(self) -> None:
        """Plan steps again after a pause. Idempotent."""
        self.is_paused = False
        self.wake()

    def vacate(self) -> SchedulerOutput:
        """Take the blocks of all running requests, which wait; in a pause, with nothing in flight.
        Returns a plan without tokens that tells the runner of it. Raises what the scheduler raises.
        """
        try:
            output = self.scheduler.vacate()
        except PolicyError as error:
            self._discard(error, self.scheduler.get_num_unfinished_requests())
            raise
        self._last_step_id = output.step_id
        self.observers.tell(self.observers.planned, output)
        return output

    # What a driver asks.

    @property
    def is_stalled(self) -> bool:
        """Whether requests wait, and neither the policy nor the runner does anything for them."""
        return self._stalled_since is not None

    def stalled_seconds(self) -> float:
        """Return for how many seconds the policy has scheduled no request although some wait."""
        return 0.0 if self._stalled_since is None else self._clock() - self._stalled_since

    def idle_seconds(self) -> float | None:
        """Return seconds until a turn, with nothing in flight, although nothing woke the driver.
        None: only when something does.
        """
        if self.is_paused or not self.scheduler.has_requests():
            return None
        if self.failures.last is not None and not self.scheduler.has_unfinished_requests():
            return None  # a policy that has just failed every request is asked when one comes
        wake, now = self.scheduler.next_wake(), self._clock()
        return wake - now if wake is not None and wake > now else IDLE_POLL_SECONDS

    # A turn.

    def fill(self) -> Iterator[StepInFlight[T]]:
        """Plan steps until the pipeline is full or there is nothing to run. Each that is yielded is
        to be handed to the runner before the next is asked for.
        """
        while len(self.in_flight) < self._depth and not self.is_paused:
            step = self.plan() if self.scheduler.has_requests() else None
            if step is None:
                return
            if self.in_flight and self.in_flight[-1] is step:
                yield step
            self.observers.tell(self.observers.planned, step.output)
            if not step.output.total_num_scheduled_tokens:
                return  # the runner hears which requests left; asking again would change nothing

    def plan(self) -> StepInFlight[T] | None:
        """Plan one step, which is in flight from then on if the runner has to hear anything of it.
        None: the policy has failed.
        """
        output = self._schedule()
        if output is None:
            return None
        self._last_step_id = output.step_id
        for request_id, why in self.scheduler.take_rejections().items():
            ended = self._finish([request_id], RequestStatus.FINISHED_REJECTED)
            self.failed.append((ended, RequestRejectedError(why.reason, why.retry_after)))
        now = self._clock()
        if output.total_num_scheduled_tokens:
            self._stalled_since = None
        else:
            self._check_stall(now)
            if not (output.finished_req_ids or output.preempted_req_ids):
                return StepInFlight(output, output, now)
        if not self.in_flight:
            self.step_since = now
        told = output
        if self._untold is not _NONE:  # with the first step after those that failed
            finished, preempted = self._retold = self._untold
            self._untold = _NONE
            told = msgspec.structs.replace(
                output,
                finished_req_ids=[*finished, *output.finished_req_ids],
                preempted_req_ids=[*preempted, *output.preempted_req_ids],
            )
        step: StepInFlight[T] = StepInFlight(output, told, now)
        self.in_flight.append(step)
        return step

    def take(self, result: ModelRunnerOutput) -> Outputs:
        """The oldest step in flight is back. Returns what it brought, by client."""
        output = self.in_flight.popleft().output
        self._retold = _NONE
        if self.in_flight:
            self.step_since = self._clock()
        if self._connector is not None:
            self._connector.update_connector_output(output.step_id)
        if not output.total_num_scheduled_tokens:
            return {}
        # First: one that is pooled would end well with its prompt, whatever came of it.
        for request_id, reason in result.failed.items():
            failed = self._finish([request_id], RequestStatus.FINISHED_ERROR)
            self.failed.append((failed, GrammarLimitError.of(reason)))
        return self._update(output, result)

    def fail(
        self, error: BaseException
    ) -> list[tuple[StepInFlight[T], ModelRunnerOutput, Outputs]]:
        """The runner has failed, and every step in flight is lost: later ones may read what a
        failed one should have written. Their requests end, the rest go on. Returns the steps, each
        with the empty result that the scheduler was given for it and what the scheduler made of it.
        """
        self.log.log("the runner's step", error)
        steps = list(self.in_flight)
        self.in_flight.clear()
        # The runner may not know which requests left: steps may have died before it read that.
        finished, preempted = map(list, self._retold)
        for step in steps:
            finished += step.output.finished_req_ids
            preempted += step.output.preempted_req_ids
        self._untold, self._retold = (finished, preempted), _NONE
        carried = [name for step in steps for name in step.output.num_scheduled_tokens]
        failed = self._finish(carried, RequestStatus.FINISHED_ERROR)
        if self._connector is not None:
            self._connector.update_connector_output(self._last_step_id)
        results = []
        for step in steps:
            request_ids = list(step.output.num_scheduled_tokens)
            result = ModelRunnerOutput(request_ids, [[] for _ in request_ids])
            outputs = self._update(step.output, result) if request_ids else {}
            results.append((step, result, outputs))
        self.failed.append((failed, error))
        return results

    def end_turn(self) -> None:
        """Note that the results of the steps have been delivered."""
        self.observers.tell(self.observers.turn_end)

    # How.

    def _check_stall(self, now: float) -> None:
        """No request was scheduled. With nothing in flight, that may not go on for long."""
        if self.in_flight or not self.scheduler.has_unfinished_requests():
            self._stalled_since = None
            return
        if set(self.scheduler.get_wait_reasons().values()) == {WaitReason.REMOTE_KVS}:
            self._stalled_since = None  # none that a policy could serve
            return
        if (wake := self.scheduler.next_wake()) is not None and wake > now:
            self._stalled_since = None  # the policy waits for a time that it has stated
            return
        if self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since >= self._stall_timeout:
            self._stalled_since = None
            num_waiting = self.scheduler.get_num_unfinished_requests()
            error = StalledError(
                f"policy {self._policy} has scheduled no request for {self._stall_timeout:g} s "
                f"although {num_waiting} wait"
            )
            if self._raises:
                raise error
            self._blame(self._finish(None, RequestStatus.FINISHED_ERROR), error)
