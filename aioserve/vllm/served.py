"""A policy that serves inside vLLM: which one may, and the time that each of its calls has.

vLLM asks its scheduler from the one thread of its engine core, which does not survive what a
scheduler raises, and which a policy that loops would hold for ever. So a policy is refused if it
asks for what vLLM's runner does not give, or overrides what vLLM asks between two steps. Every call
in which code of a policy runs is bounded: one that does not come back is ended where it stands, and
raises as if the policy had raised. What follows of a failure is the step loop's.
"""

from types import TracebackType

from aioserve.config import SchedulerConfig
from aioserve.errors import CallInterrupted, ConfigError, PolicyError
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import Request
from aioserve.scheduler import BaseScheduler, SchedulerInterface, SchedulerOutput, load_policy
from aioserve.scheduler.blame import place
from aioserve.scheduler.delegate import DelegatingScheduler
from aioserve.testing.violation import begin_call, end_call

#: Methods of `SchedulerInterface` that a policy may override: `BoundedScheduler` bounds them, and
#: the step loop takes what they raise as a failure of the policy.
MAY_OVERRIDE = ("schedule", "add_request", "update_from_output", "vacate", "switch")


def load_served(name: str) -> type[BaseScheduler]:
    """Return the class of a policy that can plan inside vLLM. Raises `ConfigError` if there is no
    such policy, if it asks for what vLLM's runner does not give, or if it overrides a method by
    which it could end vLLM's engine core.
    """
    policy = load_policy(name)
    if not issubclass(policy, BaseScheduler):
        raise ConfigError(
            f"policy {name!r} derives from SchedulerInterface alone: inside vLLM, policies derive "
            "from BaseScheduler"
        )
    if policy.sets_frequency:
        raise ConfigError(
            f"policy {policy.__name__} sets the card's clock (sets_frequency), which only a "
            "simulated card has; it would have no effect inside vLLM: compare it "
            "(python -m aioserve compare)"
        )
    if policy.wants_row_values:
        raise ConfigError(
            f"policy {policy.__name__} wants row values ({', '.join(policy.wants_row_values)}), "
            "which vLLM's runner does not compute: serve it by aioserve itself, on a CPU"
        )
    for method in vars(SchedulerInterface):
        if method.startswith("_") or method in MAY_OVERRIDE:
            continue
        if getattr(policy, method) is not getattr(BaseScheduler, method):
            raise ConfigError(
                f"policy {policy.__name__} overrides {method}(), which vLLM's engine core may call "
                "outside of a step: what the policy raised there would end every request. "
                f"Inside vLLM a policy leaves it to BaseScheduler; of SchedulerInterface it may "
                f"override {', '.join(MAY_OVERRIDE)}"
            )
    return policy


class BoundedScheduler(DelegatingScheduler):
    """A scheduler whose calls, as far as code of the policy runs in them, take `seconds` seconds at
    most. Each raises `PolicyError` then, with the line at which the policy was.
    """

    def __init__(self, live: SchedulerInterface, seconds: float) -> None:
        super().__init__(live)
        self.seconds = seconds
        # One for each method, since no call of a method is made within another of the same one.
        self._adding, self._planning = _Bound(self, "add_request()"), _Bound(self, "schedule()")
        self._taking = _Bound(self, "update_from_output()")
        self._vacating, self._switching = _Bound(self, "vacate()"), _Bound(self, "switch()")

    def add_request(self, request: Request) -> None:
        with self._adding:
            self.live.add_request(request)

    def schedule(self) -> SchedulerOutput:
        with self._planning:
            return self.live.schedule()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        with self._taking:
            return self.live.update_from_output(scheduler_output, model_runner_output)

    def vacate(self) -> SchedulerOutput:
        with self._vacating:
            return self.live.vacate()

    def switch(self, settings: SchedulerConfig) -> SchedulerInterface:
        with self._switching:
            return super().switch(settings)


class _Bound:
    """A bound on the calls of one method, one at a time: each is a `with` block."""

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
        # A call in the main thread is ended by KeyboardInterrupt.
        if self._call.was_ended and isinstance(error, CallInterrupted | KeyboardInterrupt):
            policy = self._scheduler.policy
            raise PolicyError(
                f"policy {policy.__name__}: {self._method} had not come back after "
                f"{self._scheduler.seconds:g} s{place(error, policy)}"
            ) from error
