"""Strict priority: `priority` first (smaller is more urgent), then order of arrival.

An urgent arrival preempts less urgent running requests and takes their seats, blocks and adapters'
places; they are computed again later. Urgent traffic can starve all other requests by design.
"""

from collections.abc import Iterator
from heapq import merge
from operator import attrgetter
from typing import Any

from aioserve.scheduler import BaseScheduler, OrderPart, Request, SchedulerOutput, VictimPart

order_key = attrgetter("order_key")


def urgency(request: Request) -> tuple[int, float]:
    """Smaller for what is more urgent, then for what came first."""
    return (request.priority, request.arrival_time)


class PriorityOrder(OrderPart):
    """The most urgent request first, then order of arrival."""

    def key(self, request: Request) -> tuple[int, float]:
        return urgency(request)


class LessUrgentVictims(VictimPart):
    """Requests that are less urgent lose their places to one that waits, the last of them first."""

    def displaceable(self, request: Request) -> Iterator[Request]:
        for other in sorted(self.policy.running, key=order_key, reverse=True):
            if other.priority > request.priority:
                yield other


class PriorityScheduler(BaseScheduler):
    """The most urgent requests run, even if they arrived last."""

    admits_in_order = "all"
    keeps_decoding = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.victims = LessUrgentVictims(self, self.options)

    def order(self, request: Request) -> tuple[int, float]:
        return urgency(request)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        running = sorted(self.running, key=order_key)
        line = merge(running, self.waiting, key=order_key) if self.waiting else running
        for request in line:
            if not step.run(request) and request in self.waiting:
                if not step.admit(request, displacing=self.victims.displaceable(request)):
                    for behind in running:  # those after the one that has to wait
                        step.run(behind)
                    break
        return step.output()
