"""Batch forming: requests are held until `size` of them wait, or the first has waited `max_wait`.

While nothing runs, `wake_at` says when `schedule` must be called again. So the engine does not poll
meanwhile, and the waiting does not count as a fault of the policy.
"""

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    SchedulerOutput,
)


class GatheredBatchScheduler(BaseScheduler):
    """Order of arrival, in batches."""

    class Options(PolicyOptions):
        size: PositiveInt = 8  # requests that make a batch
        max_wait: PositiveFloat = 0.2  # seconds that the first of them waits at most

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        first = next(iter(self.waiting), None)
        if first is None:
            return step.output()
        due = first.arrival_time + self.options.max_wait
        if len(self.waiting) < self.options.size and self.clock() < due:
            self.wake_at(due)
            return step.output()
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
