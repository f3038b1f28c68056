"""Predicted lengths: the shortest reply goes first, and no request waits for ever.

A client, or a predictor in front of the server, sends the hint `predicted_output_tokens`. Without
it, the scheduler uses the newest replies to the same client and class. A request is ordered as if
it had arrived a second later for every `tokens_per_second` tokens of its predicted reply. Until a
first reply has ended, each one counts as `usual` tokens.
"""

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    Request,
    SchedulerOutput,
)


class ShortestPredictedScheduler(BaseScheduler):
    """Decodes first, then the prompts with the shortest predicted replies."""

    admits_in_order = "all"
    uses_predicted_tokens = True  # it learns from each reply that ends

    class Options(PolicyOptions):
        usual: PositiveFloat = 200.0  # tokens of a reply of which nothing is known yet
        tokens_per_second: PositiveFloat = 10.0  # of reply, that a second of waiting is worth

    def order(self, request: Request) -> float:
        length = self.predicted_tokens(request, self.options.usual)
        ahead: float = length / self.options.tokens_per_second
        return request.arrival_time + ahead

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():  # returns those that are half-way in their prompts
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
