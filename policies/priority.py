"""Strict priority: `priority` first (smaller is more urgent), then order of arrival.

An urgent arrival takes the seat and the blocks of less urgent runners, which are computed again
later. Urgent traffic can starve the rest: that is what it is for.
"""

from aioserve.scheduler import BaseScheduler, Request, SchedulerOutput


class PriorityScheduler(BaseScheduler):
    """The most urgent requests run, whoever came first."""

    def order(self, request: Request) -> tuple[int, float]:
        return (request.priority, request.arrival_time)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in sorted(self.running, key=lambda r: r.order_key):
            step.run(request)
        for request in self.waiting:
            while not step.admit(request):
                victim = self.victim()
                if victim is None or victim.priority <= request.priority:
                    return step.output()
                step.preempt(victim)
        return step.output()
