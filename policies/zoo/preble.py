"""Requests in turns by how much of the prompt is cached (the local queue of Preble, ICLR'25).

Paper: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", ICLR'25,
arXiv 2407.00023.

Aim: cache hits without starving prompts that share nothing.

Says: each replica puts its waiting requests into groups by the share of the prompt that is cached.
From the group of the highest share the most requests are taken in a round, from the next one fewer,
down to one from the group that shares least; in a group the oldest goes first.

Simplified: one engine; which replica gets a request is a router's part. The groups are formed anew
in each step with a free seat, from `window` requests.

Cost: O(w log w) of w waiting requests compared, in steps with a free seat.

Needs: nothing.
"""

from collections import deque
from itertools import islice
from typing import Any

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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taken = [0] * self.options.num_groups  # turns that each group had in this round

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        has_room = step.token_budget > 0 and len(self.running) < self.max_num_seqs
        groups = self.grouped(self.options.window if has_room else 1)
        while (group := self.next_group(groups)) is not None:
            if not step.admit(groups[group].popleft()):
                break  # no request passes one that does not fit, or it would never fit
            self.taken[group] += 1
        return step.output()

    def grouped(self, window: int) -> list[deque[Request]]:
        """Return the waiting requests by the share of their prompts that is cached, least first."""
        count = self.options.num_groups
        groups: list[deque[Request]] = [deque() for _ in range(count)]
        for request in islice(self.waiting, window):
            cached = self.kv_cache.estimate_cached_tokens(request)
            groups[min(int(count * cached / request.num_tokens), count - 1)].append(request)
        return groups

    def next_group(self, groups: list[deque[Request]]) -> int | None:
        """Return the best group with a turn left; a new round begins when none has one."""
        present = [i for i in reversed(range(len(groups))) if groups[i]]
        for group in present:
            if self.taken[group] <= group:
                return group
        self.taken = [0] * len(groups)
        return present[0] if present else None
