"""The half of the step loop that asks the policy, and tells its faults from those of aioserve.

Says which requests end when a policy fails, and lets a plain policy plan once it has failed too
often in a row. Knows no step in flight and no runner.
"""

from collections.abc import Callable, Iterable

from aioserve.config import SchedulerConfig
from aioserve.errors import FROM_OUTSIDE, AioserveError, PolicyError, place_of
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import FAILURES_UNTIL_FALLBACK, SchedulerInterface, SchedulerOutput
from aioserve.scheduler.blame import as_policy_error, blamed, describe_result
from aioserve.step_loop.failure_log import FailureLog
from aioserve.step_loop.observers import Observers

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
        """Whether the policy has failed too often by now."""
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
