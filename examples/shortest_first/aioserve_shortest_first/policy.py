"""Shortest prompt first, with ageing: short prompts overtake long ones, but not for ever.

A prompt of n tokens is ordered as if it had arrived n / `tokens_per_second` seconds later than it
did. A request that arrives after that time cannot overtake it, so no request starves. The larger
the number, the closer the order is to first come, first served.
"""

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    Request,
    SchedulerOutput,
)


class ShortestFirstScheduler(BaseScheduler):
    """Decodes first, then the prompts that are short for the time they have waited."""

    admits_in_order = "all"  # a promise: the contract checks it

    class Options(PolicyOptions):
        tokens_per_second: PositiveFloat = 500.0  # of prompt, that a second of waiting is worth

    def order(self, request: Request) -> float:
        return request.arrival_time + request.num_prompt_tokens / self.options.tokens_per_second

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():  # returns those that are half-way in their prompts
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
