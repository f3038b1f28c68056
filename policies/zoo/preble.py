"""Requests in turns by how much of the prompt is cached (the local queue of Preble, ICLR'25).

Paper: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", ICLR'25,
arXiv 2407.00023.

Aim: cache hits without starving prompts that share nothing.

Says: each replica puts its waiting requests into groups by the share of the prompt that is cached.
From the group of the highest share the most requests are taken in a round, from the next one fewer,
down to one from the group that shares least; in a group the oldest goes first.

Simplified: one engine; which replica gets a request is a router's part. The groups are formed anew
in each step, from `window` requests.

Cost: O(w log w) of w waiting requests compared, in steps with a free seat.

Needs: nothing.
"""

from itertools import islice

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveInt,
    Request,
    SchedulerOutput,
)


class PrebleScheduler(BaseScheduler):
    """Decodes, running prompts, then rounds through groups of the cached share."""

    keeps_decoding = True

    class Options(PolicyOptions):
        num_groups: PositiveInt = 10  # by cached share; in a round the best has this many turns
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)
        window: PositiveInt = 512  # waiting requests compared per step, oldest first

    options: Options

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        has_room = step.token_budget > 0 and len(self.running) < self.max_num_seqs
        for request in self.rounds(self.options.window if has_room else 1):
            if not step.admit(request):
                break  # no request passes one that does not fit, or it would never fit
        return step.output()

    def rounds(self, window: int) -> list[Request]:
        """The waiting requests in the order of their turns."""
        count = self.options.num_groups
        taken = [0] * count  # requests of each group so far
        turns = []
        for i, request in enumerate(islice(self.waiting, window)):
            cached = self.kv_cache.estimate_cached_tokens(request)
            group = min(int(count * cached / request.num_tokens), count - 1)
            turns.append((taken[group] // (group + 1), -group, i, request))
            taken[group] += 1
        return [request for *_, request in sorted(turns)]
