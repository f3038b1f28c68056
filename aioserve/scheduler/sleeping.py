"""Sleep: no request keeps anything of the KV cache, whose memory the runner gives back.

Knows what requests and leases hold. When an engine sleeps, its operator says.
"""

from abc import abstractmethod

from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.step import Step
from aioserve.scheduler.succession import Switchable


class Sleeping(Switchable):
    """A scheduler whose requests can give back all their memory, and are computed again."""

    @abstractmethod
    def new_step(self, token_budget: int | None = None) -> Step:
        """Begin an empty step, as `BaseScheduler.new_step` does."""

    def vacate(self) -> SchedulerOutput:
        step = self.new_step()
        for request in (*self.book.running, *self.book.paused):
            step.preempt(request)
        self.kv_cache.leases.end_all()
        for resource in self.kv_cache.resources:
            resource.vacate()
        return step.output()
