"""A policy that calls the verbs at random: the contract must hold whatever a policy decides."""

import random
from typing import Any

from aioserve.scheduler import BaseScheduler, Request, SchedulerOutput


class HostileScheduler(BaseScheduler):
    """Any verb on anybody in any order, and any victim; less hostile after a while, so that
    whoever needs hundreds of steps in a tiny pool finishes at all.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pool = self.kv_cache.pool.num_blocks
        self._random = random.Random(pool * self.max_num_seqs + self.max_num_batched_tokens)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self._random.choice([1, 3, 17, None]))
        for _ in range(self._random.randint(1, 30)):
            anybody = [*self.running, *self.waiting]
            if not anybody:
                break
            request = self._random.choice(anybody)
            verb = self._random.random()
            if verb < 0.5:
                step.run(request, self._random.choice([None, 1, 4]))
            elif verb < 0.87:
                whole = self._random.random() < 0.2
                step.admit(request, self._random.choice([None, 2]), whole=whole)
            elif self._is_hostile:
                step.preempt(request)
        if not step.requests:  # nobody happened to be asked: that would be a stall
            for request in [*self.running, *self.waiting]:
                step.run(request)
                step.admit(request)
        return step.output()

    def victim(self) -> Request | None:
        is_any = self._is_hostile and self._random.random() < 0.3
        return self._random.choice(self.running) if is_any else super().victim()

    @property
    def _is_hostile(self) -> bool:
        return self.num_steps % 1000 < 100 and self.num_steps % 3 > 0
