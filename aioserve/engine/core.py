"""The engine task: schedule, hand the step to the runner, take the result, deliver.

The one place where the order of these is decided. Knows nothing about text, HTTP or tensors.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from aioserve.config import SchedulerConfig
from aioserve.engine.failure_log import FAULTS, FailureLog
from aioserve.errors import (
    FROM_OUTSIDE,
    AioserveError,
    PolicyError,
    RequestFailedError,
    RunnerDeadError,
)
from aioserve.outputs import EngineCoreOutput, EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler import FAILURES_UNTIL_FALLBACK, SchedulerInterface, SchedulerOutput
from aioserve.scheduler.blame import describe_result, place

# When a policy holds everybody back, it is asked again after so many seconds even if nothing
# happened: long enough to cost nothing, short enough to be unnoticed. A guess.
IDLE_POLL_SECONDS = 0.01

# Loops round their timers to a millisecond: one that comes too early asks again so much later.
TIMER_SECONDS = 0.001

_NOBODY: tuple[list[str], list[str]] = ([], [])

Deliver = Callable[[int, list[EngineCoreOutput]], list[str]]
Expire = Callable[[list[str]], None]
Fail = Callable[[list[str] | None, BaseException], None]


class EngineCore:
    """Runs steps for as long as there are requests; sleeps on an event otherwise.

    All calls come from the event loop, so nothing needs a lock: a call between two awaits of
    `run` sees, and leaves, a consistent scheduler.
    """

    def __init__(
        self,
        scheduler: SchedulerInterface,
        runner: RunnerInterface,
        *,
        pipeline_depth: int,
        stall_timeout: float,
        clock: Callable[[], float],
        deliver: Deliver,
        expire: Expire,
        fail: Fail,
        note_scheduled: Callable[[Iterable[str], float], None] = lambda request_ids, now: None,
        after_step: Callable[[], None] = lambda: None,
        fallback: SchedulerConfig | None = None,
    ) -> None:
        """`deliver` gets a client's outputs of each step and returns the ids that a stop string has
        ended, `expire` gets those whose deadline has passed, `fail` those that may have lost their
        step (None: any) and why, and tells those that have ended; `note_scheduled` gets what enters
        the batch and when; `after_step` is called when all that is done. `stall_timeout` is in
        seconds, `clock` is the scheduler's. `fallback`: the settings by which a step is planned
        once the policy has failed `FAILURES_UNTIL_FALLBACK` times in a row; None: all requests end.
        """
        self.scheduler = scheduler
        self._runner = runner
        self._pipeline_depth = pipeline_depth
        self._stall_timeout = stall_timeout
        self._clock = clock
        self._deliver = deliver
        self._expire = expire
        self._fail = fail
        self._note_scheduled = note_scheduled
        self._after_step = after_step
        #: What the policy did wrong in its last step, and when; None: it works.
        self.policy_failure: tuple[Exception, float] | None = None
        self.num_policy_failures = 0
        self.first_policy_failure: Exception | None = None  # in the engine's life
        #: The failure after which the fallback took the policy's place; None: the policy plans.
        self.replaced_after: Exception | None = None
        self._fallback = fallback
        self._num_failures_in_row = 0
        self._last_failure = 0  # the newest step that had been planned by then
        self._last_step_id = 0  # of the last step that was handed to the runner
        self._step_since = 0.0  # when the runner began the oldest step in flight, about
        self._stalled_since: float | None = None
        self._is_paused = False
        self._is_quiet = asyncio.Event()  # of a pause: no step is in flight any more
        self._wakeup = asyncio.Event()
        #: What was planned, what will come of it, and when it was handed over.
        self._in_flight: deque[tuple[SchedulerOutput, asyncio.Future[ModelRunnerOutput], float]]
        self._in_flight = deque()
        # Ids that have finished or were preempted: to be told again, told with a step in flight.
        self._untold = self._retold = _NOBODY
        # Not yet told: their tokens go first.
        self._failed: list[tuple[list[str] | None, BaseException]] = []
        self._timer: asyncio.TimerHandle | None = None  # for the next deadline, at `_timer_due`
        self._timer_due = math.inf
        self.failures = FailureLog(clock)
        runner.watch(self._wakeup.set)
        if (connector := scheduler.get_kv_connector()) is not None:
            connector.wake = self._wakeup.set

    def add_request(self, request: Request) -> None:
        """Queue a request; raises what the scheduler raises. A policy that cannot put the request
        in order has failed as in a step.
        """
        try:
            self.scheduler.add_request(request)
        except PolicyError as error:
            if not (self._note_failure(error) and self._fall_back(error)):
                raise
            self.scheduler.add_request(request)
        self._wakeup.set()
        self._set_timer()

    def finish_requests(
        self, request_ids: Iterable[str] | None, status: RequestStatus
    ) -> list[str]:
        """End requests; their blocks return at once, or when the step in flight is back."""
        finished = self.scheduler.finish_requests(request_ids, status)
        self._wakeup.set()
        return finished

    def switch(self, settings: SchedulerConfig) -> None:
        """Let the policy of `settings` go on, and ask it at once: what the last policy did wrong is
        forgotten. Raises what the scheduler raises; nothing has changed then.
        """
        self.scheduler = self.scheduler.switch(settings)
        self.policy_failure = self.replaced_after = None
        self._num_failures_in_row = 0
        self._wakeup.set()

    async def pause(self) -> None:
        """Plan no further step; return when those in flight are back and delivered. Idempotent."""
        self._is_paused, self._stalled_since = True, None
        self._is_quiet.clear()
        self._wakeup.set()
        await self._is_quiet.wait()

    def resume(self) -> None:
        """Go on. Idempotent."""
        self._is_paused = False
        self._wakeup.set()

    async def vacate(self) -> None:
        """In a pause: all that run lose their blocks, and wait. Raises what the scheduler raises,
        and what the runner does, which is told.
        """
        try:
            output = self.scheduler.vacate()
        except PolicyError as error:
            self._discard(error, self.scheduler.get_num_unfinished_requests())
            raise
        self._last_step_id = output.step_id
        await self._runner.execute_model(output)

    @property
    def step_since(self) -> float | None:
        """When the runner began its step; None if it is idle. Other threads may read it."""
        return self._step_since if self._in_flight else None

    def steps_in_flight(self) -> list[tuple[SchedulerOutput, float]]:
        """The steps that are with the runner, the oldest first, and when each was handed over."""
        return [(output, since) for output, _, since in self._in_flight]

    def step_seconds(self) -> float:
        """For how long the runner has been at the step that it computes; 0 if it is idle."""
        return self._clock() - self._step_since if self._in_flight else 0.0

    def stalled_seconds(self) -> float:
        """For how long the policy has scheduled nobody although requests wait."""
        return 0.0 if self._stalled_since is None else self._clock() - self._stalled_since

    async def run(self) -> None:
        """The engine task. Ends only by cancellation or by the error that killed the engine."""
        try:
            while True:
                await self.step()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    async def step(self) -> None:
        """Fill the pipeline, deliver while it computes, wait for the oldest step or for work."""
        self._wakeup.clear()
        outputs: dict[int, EngineCoreOutputs] = {}
        if self._in_flight:
            outputs = await self._take_result()
        else:
            self._runner.check()
        while len(self._in_flight) < self._pipeline_depth and self._dispatch():
            pass
        # The next step computes already; only now the last one's tokens are turned into text.
        for client_index, client_outputs in outputs.items():
            if stopped := self._deliver(client_index, client_outputs.outputs):
                self.finish_requests(stopped, RequestStatus.FINISHED_STOPPED)
        while self._failed:
            self._fail(*self._failed.pop(0))
        try:
            self._after_step()
        except FAULTS as error:  # an observer's: no request is lost over it
            self.failures.log("what is told after each step", error)
        if not self._in_flight:
            if self._is_paused:
                self._is_quiet.set()
            await self._sleep()

    def _dispatch(self) -> bool:
        """Schedule one step and hand it over; False if there is nothing to run now."""
        if self._is_paused or not self.scheduler.has_requests():
            return False
        output = self._schedule()
        if output is None:
            return False
        self._last_step_id = output.step_id
        if output.total_num_scheduled_tokens == 0:
            self._check_stall()
            if not (output.finished_req_ids or output.preempted_req_ids):
                return False
            self._hand_over(output)
            return False  # the runner hears who left; asking again now would change nothing
        self._stalled_since = None
        self._hand_over(output)
        if output.scheduled_new_reqs:
            ids = (new.request_id for new in output.scheduled_new_reqs)
            self._note_scheduled(ids, self._clock())
        return True

    def _hand_over(self, output: SchedulerOutput) -> None:
        now = self._clock()
        if not self._in_flight:
            self._step_since = now
        told = output
        if self._untold != _NOBODY:  # with the first step after those that failed
            finished, preempted = self._retold = self._untold
            self._untold = _NOBODY
            told = msgspec.structs.replace(
                output,
                finished_req_ids=[*finished, *output.finished_req_ids],
                preempted_req_ids=[*preempted, *output.preempted_req_ids],
            )
        try:
            future = self._runner.execute_model(told)
        except Exception as error:  # as good as in its result
            future = asyncio.get_running_loop().create_future()
            future.set_exception(error)
        self._in_flight.append((output, future, now))

    def _schedule(self) -> SchedulerOutput | None:
        """Ask the policy. If it fails, the requests of that step do, and the engine goes on."""
        num_before = self.scheduler.get_num_unfinished_requests()
        try:
            output = self.scheduler.schedule()
            if not isinstance(output, SchedulerOutput) or output.step_id <= self._last_step_id:
                raise PolicyError(
                    f"policy {self._policy}: schedule() must return the output() of a new step, "
                    f"got {describe_result(output)}"
                )
        except FROM_OUTSIDE:
            raise
        except BaseException as error:
            self._discard(self._as_policy_error(error, "schedule()"), num_before)
            return None
        if (num_missing := num_before - self.scheduler.get_num_unfinished_requests()) > 0:
            what = (
                f"schedule() has ended {num_missing} requests: it plans, and the engine ends them"
            )
            self._blame_policy(None, PolicyError(f"policy {self._policy}: {what}"))
        return output

    def _discard(self, error: Exception, num_before: int) -> None:
        """A step was not planned after all; `num_before` requests were there before it."""
        failed = self.scheduler.discard_step(self._last_step_id)
        # Requests that the policy itself has ended hear of it, too: their clients wait.
        are_all_told = num_before - len(failed) == self.scheduler.get_num_unfinished_requests()
        self._blame_policy(failed if are_all_told else None, error)

    @property
    def _policy(self) -> str:
        return self.scheduler.policy.__name__

    def _blame_policy(self, request_ids: list[str] | None, error: Exception) -> None:
        """The policy has failed: these requests hear of it if they have ended, None: all that have.
        The others are planned again at once, by the fallback if the policy has failed too often.
        """
        if self._note_failure(error) and not self._fall_back(error):
            self.scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR)
            request_ids = None
        self._failed.append((request_ids, error))
        if self.scheduler.has_unfinished_requests():
            self._wakeup.set()

    def _note_failure(self, error: Exception) -> bool:
        """Whether the policy has failed too often by now."""
        self.policy_failure = error, self._clock()
        self.first_policy_failure = self.first_policy_failure or error
        self.num_policy_failures += 1
        self._num_failures_in_row += 1
        self._last_failure = self._last_step_id
        self.failures.log(f"policy {self._policy}", error)
        return self._num_failures_in_row >= FAILURES_UNTIL_FALLBACK

    def _fall_back(self, error: Exception) -> bool:
        """Let the fallback plan from now on. False if that cannot be, or did not help."""
        policy, count = self._policy, self._num_failures_in_row
        self._num_failures_in_row = 0
        if self._fallback is None or self.replaced_after is not None:
            return False
        try:
            self.scheduler = self.scheduler.switch(self._fallback)
        except AioserveError as refusal:
            self.failures.log(f"the fallback for policy {policy}", refusal)
            return False
        self.replaced_after = error
        self.failures.announce(
            f"policy {policy} has failed {count} times in a row: a plain policy, first come first "
            "served, plans in its place until a policy is chosen anew (POST /admin/policy)"
        )
        return True

    def _as_policy_error(self, error: BaseException, where: str) -> Exception:
        """With the line of the policy, if one was running."""
        what = f"policy {self._policy} raised {error!r} in {where}"
        if isinstance(error, PolicyError):
            what = str(error)
        elif isinstance(error, AioserveError):
            return error
        wrapped = PolicyError(what + place(error, self.scheduler.policy))
        wrapped.__cause__ = error
        return wrapped

    def _check_stall(self) -> None:
        """Nobody was scheduled. With nothing in flight, that may not go on for long."""
        if self._in_flight or not self.scheduler.has_unfinished_requests():
            self._stalled_since = None
            return
        if set(self.scheduler.get_wait_reasons().values()) == {WaitReason.REMOTE_KVS}:
            self._stalled_since = None  # nobody whom a policy could serve
            return
        now = self._clock()
        if self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since >= self._stall_timeout:
            self._stalled_since = None
            failed = self.scheduler.finish_requests(None, RequestStatus.FINISHED_ERROR)
            error = PolicyError(
                f"policy {self._policy} has scheduled nobody for {self._stall_timeout:g} s "
                f"although {len(failed)} requests wait"
            )
            self._blame_policy(failed, error)

    async def _take_result(self) -> dict[int, EngineCoreOutputs]:
        output, future, _ = self._in_flight[0]
        try:
            result = await future
        except RunnerDeadError:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return await self._fail_steps(error)  # the runner's own doing
        except Exception as error:
            return await self._fail_steps(error)
        self._in_flight.popleft()
        self._retold = _NOBODY
        if self._in_flight:
            self._step_since = self._clock()
        if (connector := self.scheduler.get_kv_connector()) is not None:
            connector.update_connector_output(output.step_id)
        if output.total_num_scheduled_tokens == 0:
            return {}
        return self._update(output, result)

    def _update(
        self, output: SchedulerOutput, result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        # First: one that is pooled would end well with its prompt, whatever came of it.
        for request_id, reason in result.failed.items():
            failed = self.finish_requests([request_id], RequestStatus.FINISHED_ERROR)
            self._failed.append((failed, RequestFailedError(reason)))
        try:
            outputs = self.scheduler.update_from_output(output, result)
            if not isinstance(outputs, dict):
                raise PolicyError(
                    f"policy {self._policy}: update_from_output() must return what the method of "
                    f"its base class returns, got {outputs!r:.100}"
                )
        except FROM_OUTSIDE:
            raise
        except BaseException as error:
            # How far it came is unknown: every request of the step ends, and those that the policy
            # has ended without a word hear of it, too. The step is back in any case.
            carried = self.scheduler.abandon_step(output)
            self.scheduler.finish_requests(carried, RequestStatus.FINISHED_ERROR)
            failure = self._as_policy_error(error, "update_from_output()")
            self._blame_policy(list(output.num_scheduled_tokens), failure)
            return {}
        self.policy_failure = None
        if output.step_id > self._last_failure:
            self._num_failures_in_row = 0
        return outputs

    async def _fail_steps(self, error: BaseException) -> dict[int, EngineCoreOutputs]:
        """Fail the requests of every step in flight: later steps may read what a failed one
        should have written. The rest go on. Returns no outputs.
        """
        self.failures.log("the runner's step", error)
        steps = list(self._in_flight)
        self._in_flight.clear()
        results = await asyncio.gather(*(future for _, future, _ in steps), return_exceptions=True)
        for result in results:
            if isinstance(result, RunnerDeadError):
                raise result
        # The runner may not know which requests left: steps may have died before it read that.
        finished, preempted = map(list, self._retold)
        for output, *_ in steps:
            finished += output.finished_req_ids
            preempted += output.preempted_req_ids
        self._untold, self._retold = (finished, preempted), _NOBODY
        failed: list[str] = []
        for output, *_ in steps:
            req_ids = list(output.num_scheduled_tokens)
            failed += self.scheduler.finish_requests(req_ids, RequestStatus.FINISHED_ERROR)
        for output, *_ in steps:
            if output.total_num_scheduled_tokens:
                req_ids = list(output.num_scheduled_tokens)
                self._update(output, ModelRunnerOutput(req_ids, [[] for _ in req_ids]))
        self._failed.append((failed, error))
        return {}

    def _set_timer(self) -> None:
        """Have deadlines looked at when the next one is due, whatever is in flight then."""
        due = self.scheduler.next_expiry()
        if due is None or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay = max(due - self._clock(), TIMER_SECONDS)
        self._timer = asyncio.get_running_loop().call_later(delay, self._on_timer)
        self._timer_due = due

    def _on_timer(self) -> None:
        """Whoever is due hears it now; the blocks return when the step in flight is back.

        Never between a step's result and its delivery: nothing waits there.
        """
        self._timer = None
        if expired := self.scheduler.expire_requests():
            self._expire(expired)
            self._wakeup.set()
        self._set_timer()

    async def _sleep(self) -> None:
        """Until something happens; or, if a policy holds requests back, for a short while.

        The loop gets a turn in any case.
        """
        if self._wakeup.is_set():
            await asyncio.sleep(0)
            return
        # A policy that has just failed everybody is asked again when somebody comes.
        if (self._is_paused or not self.scheduler.has_requests()) or (
            self.policy_failure is not None and not self.scheduler.has_unfinished_requests()
        ):
            await self._wakeup.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(IDLE_POLL_SECONDS):
                await self._wakeup.wait()
