"""Strict priority: `priority` first (smaller is more urgent), then order of arrival.

An urgent arrival goes before less urgent runners and takes their seats, blocks and adapters'
places; they are computed again later. Urgent traffic can starve the rest: that is what it is for.
"""

from heapq import merge
from operator import attrgetter

from aioserve.scheduler import BaseScheduler, Request, SchedulerOutput

order_key = attrgetter("order_key")


class PriorityScheduler(BaseScheduler):
    """The most urgent requests run, even if they arrived last."""

    admits_in_order = "all"
    keeps_decoding = True

    def order(self, request: Request) -> tuple[int, float]:
        return (request.priority, request.arrival_time)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        running = sorted(self.running, key=order_key)
        line = merge(running, self.waiting, key=order_key) if self.waiting else running
        for request in line:
            if not step.run(request) and request in self.waiting:
                less_urgent = (r for r in reversed(running) if r.priority > request.priority)
                if not step.admit(request, displacing=less_urgent):
                    for behind in running:  # those after the one that has to wait
                        step.run(behind)
                    break
        return step.output()
