"""The plain policy that plans while the configured one fails: first come, first served, in chunks.

It reads nothing but the queue, so that no option and no state of another policy can make it fail.
"""

from aioserve.scheduler.base import BaseScheduler
from aioserve.scheduler.output import SchedulerOutput

#: As the setting `scheduler.policy` has it.
FALLBACK_POLICY = "aioserve.scheduler.fallback:FallbackScheduler"

#: A policy that fails so often in a row gives way: its first failure may have been over requests
#: that have ended by then.
FAILURES_UNTIL_FALLBACK = 2


class FallbackScheduler(BaseScheduler):
    """Running requests first, then waiting ones in order of arrival, until the step is full."""

    admits_in_order = "all"
    keeps_decoding = True

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
