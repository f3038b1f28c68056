"""Admission by the peak of future memory (LightLLM; Past-Future, ASPLOS'25): preempt hardly ever.

Paper: Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS'25, arXiv
2507.10150; the scheduler of LightLLM.

Aim: no work lost to preemption, at full memory.

Says: a request enters only if the most memory that all running ones will hold together, as each
grows to its end, stays below the capacity. LightLLM takes the limits of clients as the ends, which
wastes memory. Past-Future takes the lengths of the last `window` replies: a reply that has n tokens
will be as long as those of them that had more than n.

Simplified: Past-Future draws a length of each request at random, up to five times a step; here it
is their mean, so that the same events have the same decisions.

Cost: O(r log r) of r running requests in steps in which a request waits, O(log k) times where k
enter.

Needs: nothing; with `lengths: hint`, predicted lengths (hint `predicted_output_tokens`).
"""

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate, islice
from typing import Any, Literal

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PeakMemory,
    PolicyOptions,
    PositiveInt,
    Request,
    SchedulerOutput,
    hinted_number,
)


class PeakMemoryScheduler(BaseScheduler):
    """Decodes, then prompts in order of arrival while the future peak of memory fits."""

    admits_in_order = "all"

    class Options(PolicyOptions):
        lengths: Literal["history", "limit", "hint"] = "history"  # where the ends come from
        window: PositiveInt = 200  # replies of which the lengths are remembered
        reserved: NonNegativeFloat = 0.05  # share of the memory that is left for mistakes
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recent: deque[int] = deque()  # lengths of the last replies, in tokens
        self.lengths: list[int] = []  # the same, sorted
        self.sums: list[int] | None = None  # of the first lengths; None: they have changed

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        if self.waiting:
            capacity = (1 - self.options.reserved) * self.memory.total
            peak = PeakMemory(self.running, self.final_tokens)
            num_seats = self.max_num_seqs - len(self.running)
            fitting = peak.num_fitting(islice(self.waiting, num_seats + 1), capacity)
            if not self.running:
                fitting = max(fitting, 1)
            for request in islice(self.waiting, fitting):
                if not step.admit(request):
                    break
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        if self.options.lengths != "history" or reason not in ("stop", "length"):
            return
        if len(self.recent) >= self.options.window:
            self.lengths.remove(self.recent.popleft())
        self.recent.append(request.num_output_tokens)
        insort(self.lengths, request.num_output_tokens)
        self.sums = None

    def final_tokens(self, request: Request) -> float:
        """Return how many tokens the request will have at its end, prompt and reply together."""
        limit, source = request.max_total_tokens, self.options.lengths
        if source == "hint":
            reply = hinted_number(request, "predicted_output_tokens", limit)
        elif source == "history":
            reply = self.longer_than(request.num_output_tokens, limit)
        else:
            reply = limit
        return min(request.num_prompt_tokens + reply, limit)

    def longer_than(self, num_tokens: int, otherwise: int) -> float:
        """Return the mean length of the recent replies of more than `num_tokens`; `otherwise`
        if there is none.
        """
        if self.sums is None:
            self.sums = list(accumulate(self.lengths))
        first = bisect_right(self.lengths, num_tokens)
        count = len(self.lengths) - first
        if not count:
            return otherwise
        return (self.sums[-1] - (self.sums[first - 1] if first else 0)) / count
