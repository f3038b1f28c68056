"""The engine's step loop without IO: plan, hand over, take back, stall, expire, fail and blame.

The asyncio engine, the simulator of fleets, the contract harness and the shadow all drive this one
object, so what is simulated is what is served. It waits for nothing and reads no clock but the one
that it is given: a driver hands each step to a runner, brings the result back, and says when.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import msgspec

from aioserve.config import SchedulerConfig
from aioserve.errors import (
    GrammarLimitError,
    PolicyError,
    RequestRejectedError,
    StalledError,
)
from aioserve.outputs import ModelRunnerOutput
from aioserve.request import RequestStatus, WaitReason
from aioserve.scheduler import SchedulerInterface, SchedulerOutput
from aioserve.step_loop.policy_guard import Outputs, PolicyGuard

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
        """In a pause, with nothing in flight: all running requests lose their blocks, and wait.
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
        """For how long the policy has scheduled no request although some wait."""
        return 0.0 if self._stalled_since is None else self._clock() - self._stalled_since

    def idle_seconds(self) -> float | None:
        """With nothing in flight: after how long to make a turn although nothing woke the driver.
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
        """What the steps brought has been delivered."""
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
