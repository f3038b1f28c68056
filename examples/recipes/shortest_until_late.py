"""Ageing: the shortest prompt goes first, until one has waited `patience` seconds.

The keys depend on the time: a request that has waited long enough moves before all that have not.
`order` is called only when a request enters the queue, so `reorder_every` makes the scheduler call
it again for the whole queue, which costs one sort. For a patience of ten seconds, once a second is
often enough.
"""

from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    Request,
    SchedulerOutput,
)


class ShortestUntilLateScheduler(BaseScheduler):
    """Requests that have waited too long in order of arrival, then the shortest prompts."""

    admits_in_order = "all"

    class Options(PolicyOptions):
        patience: PositiveFloat = 10.0  # seconds after which length does not matter any more
        reorder_every: PositiveFloat = 1.0  # seconds between two looks at the time

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reorder_every = self.options.reorder_every

    def order(self, request: Request) -> tuple[bool, float]:
        if self.clock() - request.arrival_time >= self.options.patience:
            return False, request.arrival_time
        return True, request.num_prompt_tokens

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
