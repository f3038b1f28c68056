"""A bound on the time of a policy inside vLLM: a call that does not come back is its failure.

vLLM asks its scheduler from the one thread of its engine core, so that a policy which loops would
hold all requests for ever, and no other thread could do anything about it. Here such a call is
ended where it stands, and raises as if the policy had raised. Knows when; what follows of a failure
is the step loop's.
"""

from types import TracebackType

from aioserve.config import SchedulerConfig
from aioserve.errors import CallInterrupted, PolicyError
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import Request
from aioserve.scheduler import SchedulerInterface, SchedulerOutput
from aioserve.scheduler.blame import place
from aioserve.scheduler.delegate import DelegatingScheduler
from aioserve.testing.violation import begin_call, end_call


class BoundedScheduler(DelegatingScheduler):
    """A scheduler whose calls, as far as code of the policy runs in them, take `seconds` seconds at
    most. Each raises `PolicyError` then, with the line at which the policy was.
    """

    def __init__(self, live: SchedulerInterface, seconds: float) -> None:
        super().__init__(live)
        self.seconds = seconds

    def add_request(self, request: Request) -> None:
        with _Bound(self, "add_request()"):
            self.live.add_request(request)

    def schedule(self) -> SchedulerOutput:
        with _Bound(self, "schedule()"):
            return self.live.schedule()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        with _Bound(self, "update_from_output()"):
            return self.live.update_from_output(scheduler_output, model_runner_output)

    def vacate(self) -> SchedulerOutput:
        with _Bound(self, "vacate()"):
            return self.live.vacate()

    def switch(self, settings: SchedulerConfig) -> SchedulerInterface:
        with _Bound(self, "switch()"):
            return super().switch(settings)


class _Bound:
    """One call, in a `with` block."""

    __slots__ = ("_call", "_method", "_scheduler")

    def __init__(self, scheduler: BoundedScheduler, method: str) -> None:
        self._scheduler, self._method = scheduler, method

    def __enter__(self) -> None:
        self._call = begin_call(self._scheduler.seconds)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        end_call(self._call)
        # In the main thread a call is ended by the latter.
        if self._call.was_ended and isinstance(error, CallInterrupted | KeyboardInterrupt):
            policy = self._scheduler.policy
            raise PolicyError(
                f"policy {policy.__name__}: {self._method} had not come back after "
                f"{self._scheduler.seconds:g} s{place(error, policy)}"
            ) from error
