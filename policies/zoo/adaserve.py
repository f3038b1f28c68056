"""Drafts as long as each stream's pace needs, then where they pay most (AdaServe, 2025).

Paper: Li et al., "AdaServe: Accelerating Multi-SLO LLM Serving with SLO-Customized Speculative
Decoding", 2025, arXiv 2501.12162.

Aim: the most requests at their own pace, by drafts of different lengths in one step.

Says: the tokens that a step verifies are a budget that the drafts of all requests share. First each
request gets as long a draft as is expected to bring it to its pace by the end of the step. The rest
of the budget goes to the draft tokens that are most likely to be accepted, of any request. The
paper reports up to 4.3 times fewer violations of service levels than the best other system, and up
to 1.9 times its goodput.

Simplified: a draft is a chain, where the paper selects trees by the probabilities of a draft model.
The chance of each next token of a chain is the share of the request's drafts that were accepted.
Left out: a budget that follows the load of the card. Of the paper, only the abstract and summaries
by others were read.

Cost: O((r + k) log r) for r running requests and k draft tokens.

Needs: paces as `slo_tpot`, else that of the options; and speculative decoding, without which it
serves as `chunked_prefill` does.
"""

from heapq import heapify, heappop, heapreplace
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    Share,
    hinted_number,
)

KNOWN = 4.0  # drafts that the rate of acceptance taken for granted counts as


class AdaServeScheduler(BaseScheduler):
    """Decodes, then prompts by arrival; drafts by pace, then by chance of acceptance."""

    uses_step_time = True

    class Options(PolicyOptions):
        tpot: PositiveFloat = 0.05  # seconds per token of a request that states no pace
        verify: PositiveInt = 64  # draft tokens of all requests that a step verifies
        rate: Share = 0.6  # share of drafts that are accepted, before any is known
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.began: dict[Request, float] = {}  # when its first token was there
        self.lengths: dict[Request, int] = {}  # of the next drafts

    def draft_length(self, request: Request) -> int | None:
        return self.lengths.get(request, 0)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        if self.max_draft_tokens:
            self.share([r for r in step.requests if r.num_output_tokens])
        return step.output()

    def share(self, requests: list[Request]) -> None:
        """Divide the budget of draft tokens: as paces ask for, then as they pay."""
        lengths, left = self.lengths, self.options.verify
        lengths.clear()
        for lag, request in sorted(((self.lag(r), r) for r in requests), key=lambda of: -of[0]):
            rate, expected = self.rate(request), 1.0  # the step's own token needs no draft
            length = 0
            while expected < lag and length < min(self.max_draft_tokens, left):
                length += 1
                expected += rate**length
            lengths[request], left = length, left - length
        heap = [
            (-(self.rate(r) ** (n + 1)), place, r)
            for place, (r, n) in enumerate(lengths.items())
            if n < self.max_draft_tokens
        ]
        heapify(heap)
        while heap and left > 0:
            chance, place, request = heap[0]
            lengths[request] += 1
            left -= 1
            if lengths[request] < self.max_draft_tokens:
                heapreplace(heap, (chance * self.rate(request), place, request))
            else:
                heappop(heap)

    def lag(self, request: Request) -> float:
        """Return the tokens that the request needs from the next step to be at its pace. A request
        that has decoded under another policy counts as having been at it.
        """
        now = self.clock()
        pace = hinted_number(request, "slo_tpot", self.options.tpot) or self.options.tpot
        more = request.num_output_tokens - 1  # tokens after the first one
        began = self.began.setdefault(request, now - more * pace)
        return (now + self.step_time.last_seconds - began) / pace - more

    def rate(self, request: Request) -> float:
        found = request.num_accepted_tokens + KNOWN * self.options.rate
        return min(found / (request.num_draft_tokens + KNOWN), 0.99)

    def on_finish(self, request: Request, reason: str) -> None:
        self.began.pop(request, None)
        self.lengths.pop(request, None)
