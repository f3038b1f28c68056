"""Preempts what frees the most memory for the least work lost (vLLM pull request, 2026).

Paper: "Add cost-aware preemption victim selection", 2026, vLLM pull request 56897.

Aim: less work computed twice when KV blocks run out.

Says: when KV blocks run out, a running request is chosen by a score, not by its place. The score is
the blocks that it alone holds, over its tokens so far, times the share of its limit of output that
it has not yet generated. So requests are spared that share their prefixes, that hold little for
what they would compute again, and that are near their end.

Simplified: the oldest request is spared, so that one always makes progress. Requests are admitted
by arrival, with chunks of prompts.

Cost: O(r) of r running requests for each preemption.

Needs: nothing; honest limits (`max_tokens`) make the progress mean something.
"""

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveInt,
    Request,
    SchedulerOutput,
)


class CostVictimScheduler(BaseScheduler):
    """Decodes, then prompts by arrival; the victim is cheap to lose for the memory it frees."""

    admits_in_order = "all"
    keeps_decoding = True

    class Options(PolicyOptions):
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def score(self, request: Request) -> float:
        """Return what preempting the request frees for what it costs; the highest is preempted."""
        limit = max(request.max_total_tokens - request.num_prompt_tokens, 1)
        ahead = 1 - request.num_output_tokens / limit
        blocks = self.memory.own(request) / self.kv_cache.block_size
        return blocks / max(request.num_tokens, 1) * ahead

    def victim(self) -> Request | None:
        first = min(self.running, key=lambda r: r.order_key, default=None)
        others = (r for r in self.running if r is not first)  # the oldest always makes progress
        return max(others, key=lambda r: (self.score(r), r.order_key), default=first)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
