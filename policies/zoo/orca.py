"""Iteration-level batching with reserved memory (Orca, OSDI'22): no request is ever preempted.

Paper: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models",
OSDI'22.

Aim: no preemption; the baseline that paged memory beats.

Says: requests enter and leave the batch between iterations, in order of arrival, and a prompt runs
whole beside the decodes of others. A request enters only if memory can be reserved for the longest
reply that it may have, so that it always runs to its end.

Simplified: one engine without pipeline parallelism. Memory is counted in tokens, not laid out in
one piece: reservation is modelled, and fragmentation is not.

Cost: constant for each request that runs or enters.

Needs: honest limits (`max_tokens`): what clients do not use stays empty.
"""

from typing import Literal

from aioserve.scheduler import BaseScheduler, PolicyOptions, PositiveInt, Request, SchedulerOutput


class OrcaScheduler(BaseScheduler):
    """Order of arrival; a request enters when its longest reply has room as well."""

    admits_in_order = "all"
    keeps_decoding = True
    runs_whole_prompts = True

    class Options(PolicyOptions):
        max_batch: PositiveInt | None = None  # requests in an iteration (default: max_num_seqs)
        reserve: Literal["request", "model"] = "request"  # up to whose limit of tokens

    options: Options

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():  # prompts that another policy left half-way
            step.run(request)
        if not self.waiting:
            return step.output()
        most, total = self.options.max_batch or self.max_num_seqs, self.memory.total
        reserved = sum(map(self.reservation, self.running))
        for request in self.waiting:
            reserved += self.reservation(request)
            if self.running and (reserved > total or len(self.running) >= most):
                break
            if not step.admit(request, whole=True):
                break
        return step.output()

    def reservation(self, request: Request) -> int:
        """Return tokens of the blocks that are set aside for the request: its last token needs
        none.
        """
        is_own = self.options.reserve == "request"
        limit = request.max_total_tokens if is_own else self.max_model_len
        size = self.kv_cache.block_size
        return -(-(limit - 1) // size) * size
