"""Reserving budget: a share of every step is kept for urgent requests, whatever else waits.

The time of a step grows with its tokens. Prompts that are not urgent get at most the share of a
step that is not `reserved`, so an urgent request finds room in the next step.
"""

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PolicyOptions,
    Request,
    SchedulerOutput,
    WaitReason,
)


class ReservedBudgetScheduler(BaseScheduler):
    """Decodes, then urgent prompts, then the others in what is left to them."""

    class Options(PolicyOptions):
        reserved: NonNegativeFloat = 0.5  # share of a step's tokens; 1 leaves the others one token
        urgent: int = -1  # requests of this priority or a smaller one

    def order(self, request: Request) -> tuple[int, float]:
        return (request.priority, request.arrival_time)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        prefills = step.run_decodes()
        open_budget = max(1, int(step.token_budget * (1 - self.options.reserved)))
        for request in sorted(prefills, key=lambda r: r.order_key):
            if self.is_urgent(request):
                step.run(request)
            else:
                open_budget -= step.run(request, open_budget)
        for request in self.waiting:  # urgent ones come first, by `order`
            if self.is_urgent(request):
                granted = step.admit(request)
            elif open_budget > 0:
                granted = step.admit(request, open_budget)
                open_budget -= granted
            else:
                granted = step.hold(request, WaitReason.BUDGET)
            if not granted:
                break
        return step.output()

    def is_urgent(self, request: Request) -> bool:
        return request.priority <= self.options.urgent
