"""A deadline: the request with the earliest deadline goes first (EDF), those without one last.

The deadline is the request's own: the field `timeout` of the body, counted from its arrival. The
engine ends a request whose deadline has passed; the policy only orders the requests before that.
"""

import math

from aioserve.scheduler import BaseScheduler, PolicyOptions, Request, SchedulerOutput


class EarliestDeadlineScheduler(BaseScheduler):
    """Decodes, then prompts in the order of their deadlines."""

    class Options(PolicyOptions):
        default_timeout: float = math.inf  # seconds from arrival, for requests without a deadline

    def order(self, request: Request) -> tuple[float, float]:
        deadline = request.deadline
        if deadline is None:
            deadline = request.arrival_time + self.options.default_timeout
        return (deadline, request.arrival_time)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in sorted(step.run_decodes(), key=lambda r: r.order_key):
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
