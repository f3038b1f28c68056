"""Shortest predicted remaining time first, with limited preemption (TRAIL, ICLR'25).

Paper: Shahout et al., "Don't Stop Me Now: Embedding Based Scheduling for LLMs" (TRAIL), ICLR'25,
arXiv 2410.01035.

Aim: low mean latency.

Says: the request with the least output to come goes first and takes the place of one with more to
come, but only of a young one: a request holds its place for good once it has generated the share
`preempt_until` of its predicted output, because by then it holds much memory.

Simplified: TRAIL predicts what remains anew after each token, from the model's own embeddings; here
one prediction comes with the request, and one that proves too short counts as short by as much
again. A second of waiting is worth `ageing` tokens, which TRAIL does not have.

Cost: O(log n) for each request that enters a queue of n; O(r log r) of r running requests in steps
in which a request waits for a place.

Needs: predicted lengths (hint `predicted_output_tokens`).
"""

from collections.abc import Iterator

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


class SRPTScheduler(BaseScheduler):
    """Decodes, then the prompts with the least output to come, in the place of those with more."""

    admits_in_order = "all"
    keeps_decoding = True

    class Options(PolicyOptions):
        preempt_until: NonNegativeFloat = 0.8  # share of a reply after which its place is kept
        ageing: NonNegativeFloat = 10.0  # predicted tokens that a second of waiting is worth
        usual: PositiveFloat = 200.0  # tokens of a reply of which nothing is predicted
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def predicted(self, request: Request) -> float:
        """Return how many tokens the whole reply will have, as predicted."""
        return hinted_number(request, "predicted_output_tokens", self.options.usual)

    def order(self, request: Request) -> tuple[float, float]:
        remaining = abs(self.predicted(request) - request.num_output_tokens)
        return (remaining + self.options.ageing * request.arrival_time, request.arrival_time)

    def victim(self) -> Request | None:
        return max(self.running, key=self.order, default=None)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in sorted(step.run_decodes(), key=self.order):
            step.run(request)
        young: list[Request] | None = None
        for request in self.waiting:
            if young is None:
                young = sorted(filter(self.is_young, self.running), key=self.order)
            if not step.admit(request, displacing=self.longer(request, young)):
                break
        return step.output()

    def is_young(self, request: Request) -> bool:
        """Return whether the request may still lose its place."""
        limit = self.options.preempt_until * self.predicted(request)
        return request.num_output_tokens < limit

    def longer(self, request: Request, young: list[Request]) -> Iterator[Request]:
        """Return those of `young` that have more to come than the waiting request, those with
        most to come first.
        """
        key = self.order(request)
        return (other for other in reversed(young) if self.order(other) > key)
