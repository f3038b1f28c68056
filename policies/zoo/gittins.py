"""The request with the best chance to end for its cost goes first (SageSched, 2026; Gittins).

Paper: Gan et al., "SageSched: Efficient LLM Scheduling Confronting Demand Uncertainty and
Hybridity", 2026, arXiv 2603.07917; Gittins, "Bandit Processes and Dynamic Allocation Indices",
1979.

Aim: low mean latency where the lengths of replies are known as a distribution alone.

Says: the length of a reply is predicted as a distribution, from past replies to similar prompts,
and the cost of a request counts its computation and its memory. By Gittins' index, the request goes
first that has the greatest ratio of its chance to end within its next tokens to the expected cost
of these tokens, for the number of tokens at which this ratio is greatest. If most replies are short
and some very long, this order differs from that by the mean. The paper reports an efficiency that
is 28.7% higher than the best other system's.

Simplified: replies of the same client, adapter and class are alike, where the paper looks for
similar prompts. The cost is KV memory over time, of the expected number of tokens. Left out: a new
order among running requests; only the victim is chosen by a fresh index. Of the paper, only the
abstract and summaries by others were read.

Cost: O(log m log n) for each request that enters, of m tokens that it may have and n known lengths;
O(r log m log n) of r running requests for each preemption.

Needs: predicted lengths (hint `predicted_output_tokens`), which leave no uncertainty; without them
it learns from past replies of the client. `ageing` is ours.
"""

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
)


class GittinsScheduler(BaseScheduler):
    """Decodes, then prompts by index; the running request with the worst index is preempted."""

    uses_predicted_tokens = True
    admits_in_order = "all"
    keeps_decoding = True

    class Options(PolicyOptions):
        ageing: NonNegativeFloat = 5000.0  # token-steps of cost that a second of waiting is worth
        usual: PositiveFloat = 200.0  # tokens of a reply before any has ended
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def price(self, request: Request) -> float:
        """Return the KV memory, in tokens times steps, that an end of the request costs: the least
        over how many more tokens are tried.
        """
        lengths, best, tokens = self.predicted_lengths(request, self.options.usual), 0.0, 1
        while True:
            expected = lengths.expected(tokens)
            cost = expected * (request.num_tokens + expected / 2)
            best = max(best, lengths.chance(tokens) / max(cost, 1.0))
            if tokens >= lengths.most - lengths.so_far:
                return 1 / best
            tokens *= 2

    def order(self, request: Request) -> tuple[float, float]:
        ageing = self.options.ageing * request.arrival_time
        return self.price(request) + ageing, request.arrival_time

    def victim(self) -> Request | None:
        first = min(self.running, key=lambda r: r.order_key, default=None)
        others = (r for r in self.running if r is not first)  # one always makes progress
        return max(others, key=lambda r: (self.price(r), r.order_key), default=first)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
