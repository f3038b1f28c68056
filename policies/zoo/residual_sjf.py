"""Prompts with the least work left after the prefix cache first (vLLM pull request, 2026).

Paper: "Add residual-aware SJF scheduling policy", 2026, vLLM pull request 51375.

Aim: early first tokens where prompts share prefixes of different lengths.

Says: by the length of its prompt a long request whose prefix is cached looks dear, though little
remains to be computed. Waiting requests are ordered by the tokens that are not cached, in whole KV
blocks, so that those with as many blocks go by arrival. Requests that were preempted go first, then
those that have waited for too long, in order of arrival, so that none starves.

Simplified: cached tokens are looked up in each step with a free seat, for `window` requests.

Cost: O(w log w) of w waiting requests compared, in steps with a free seat.

Needs: nothing.
"""

from itertools import islice

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PolicyOptions,
    PositiveInt,
    Request,
    RequestStatus,
    SchedulerOutput,
)


class ResidualSJFScheduler(BaseScheduler):
    """Decodes, running prompts, then the waiting prompts with the fewest uncached blocks."""

    keeps_decoding = True

    class Options(PolicyOptions):
        max_wait: NonNegativeFloat = 10.0  # seconds after which a request goes by arrival; 0: FCFS
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)
        window: PositiveInt = 512  # waiting requests compared per step, oldest first

    options: Options

    def schedule(self) -> SchedulerOutput:
        step, now = self.new_step(self.options.chunk_size), self.clock()
        for request in step.run_decodes():
            step.run(request)
        has_room = step.token_budget > 0 and len(self.running) < self.max_num_seqs
        line = list(islice(self.waiting, self.options.window if has_room else 1))
        for request in sorted(line, key=lambda r: self.turn(r, now)):
            if not step.admit(request):
                break  # no request passes one that does not fit, or it would never fit
        return step.output()

    def turn(self, request: Request, now: float) -> tuple[int, int, float]:
        """Return the sort key of a waiting request: its tier, its blocks to compute, arrival."""
        if request.status is RequestStatus.PREEMPTED:
            return 0, 0, request.arrival_time
        if now - request.arrival_time >= self.options.max_wait:
            return 1, 0, request.arrival_time
        residual = request.num_tokens - self.kv_cache.estimate_cached_tokens(request)
        return 2, residual // self.kv_cache.block_size, request.arrival_time
