"""First come, first served (Orca, OSDI'22): whole prompts in order of arrival.

The honest baseline. A prompt runs in one piece beside the decodes, so a long one stalls every
stream for a step; no request overtakes another.
"""

from aioserve.scheduler import BaseScheduler, SchedulerOutput


class FCFSScheduler(BaseScheduler):
    """Running requests, then whole prompts while they fit."""

    admits_in_order = "all"
    keeps_decoding = True
    runs_whole_prompts = True

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():  # prompts that another policy left half-way
            step.run(request)
        for request in self.waiting:
            if not step.admit(request, whole=True):
                break
        return step.output()
