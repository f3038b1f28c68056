"""Policies that take over from a policy under test: sound policies, and some that fail to.

Knows classes. What must be true after a switch is checked by `SchedulerHarness`.
"""

from functools import cache
from typing import Any

from aioserve.request import Request
from aioserve.scheduler import BaseScheduler, SchedulerOutput, load_policy

NAMES = (
    *("chunked_prefill", "deadline", "fair", "fcfs", "hrrn"),
    *("latency_budget", "mlfq", "prefix_aged", "priority"),
)


@cache
def sound_policies() -> tuple[type[BaseScheduler], ...]:
    """The policies that come with aioserve."""
    policies = [load_policy(name) for name in NAMES]
    return tuple(policy for policy in policies if issubclass(policy, BaseScheduler))


class PausesAll(BaseScheduler):
    """Order of arrival; every third step, each request that runs is offloaded, else paused."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        if step.step_id % 3 == 0:
            for request in self.running:
                if not step.offload(request):
                    step.pause(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


class _Fails(BaseScheduler):
    def schedule(self) -> SchedulerOutput:
        raise AssertionError("it never took over")


class FailsToBegin(_Fails):
    """A policy that raises in `__init__`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        raise ValueError("planted in __init__")


class FailsToTakeOver(_Fails):
    """Raises in `take_over`, when all has been handed over and stands in another order."""

    def order(self, request: Request) -> float:
        return -request.arrival_time

    def take_over(self, other: BaseScheduler) -> None:
        super().take_over(other)
        raise ValueError("planted in take_over")


class FailsToOrder(_Fails):
    """Raises in `order` for the last request, when all before it have got other keys."""

    def take_over(self, other: BaseScheduler) -> None:
        self.num_left = len(other.get_requests())
        super().take_over(other)
        raise ValueError("there was no request to order")

    def order(self, request: Request) -> float:
        self.num_left -= 1
        if not self.num_left:
            raise ValueError("planted in order")
        return -request.arrival_time


FAILURES: dict[str, type[BaseScheduler]] = {
    "__init__": FailsToBegin,
    "take_over": FailsToTakeOver,
    "order": FailsToOrder,
}
