"""Shortest predicted job first, with ageing (SSJF, 2024; LTR, NeurIPS'24).

Paper: Qiu et al., "Efficient Interactive LLM Serving with Proxy Model-based Sequence Length
Prediction" (SSJF), 2024, arXiv 2404.08509; Fu et al., "Efficient LLM Scheduling by Learning to
Rank" (LTR), NeurIPS'24, arXiv 2408.15792.

Aim: low mean latency.

Says: a small model predicts how long each reply will be, or only which of two will be longer, and
the request with the shortest reply goes first. Running requests are not preempted for others.
Requests that have waited long are lifted, so that long replies do not starve.

Simplified: the prediction comes with the request. LTR lifts a request after a number of steps in
which it was passed over; here each second of waiting is worth `ageing` predicted tokens.

Cost: O(log n) for each request that enters a queue of n; constant for each that runs.

Needs: predicted lengths (hint `predicted_output_tokens`).
"""

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    hinted_number,
)


class SJFScheduler(BaseScheduler):
    """Decodes, then the prompts with the shortest predicted replies."""

    admits_in_order = "all"
    keeps_decoding = True

    class Options(PolicyOptions):
        ageing: NonNegativeFloat = 10.0  # predicted tokens that a second of waiting is worth
        usual: PositiveFloat = 200.0  # tokens of a reply of which nothing is predicted
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def order(self, request: Request) -> tuple[float, float]:
        length = hinted_number(request, "predicted_output_tokens", self.options.usual)
        return (length + self.options.ageing * request.arrival_time, request.arrival_time)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in step.run_decodes():  # returns those that are half-way in their prompts
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
