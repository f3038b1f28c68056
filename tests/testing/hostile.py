"""Policies that call the verbs at random, or raise: the rules must hold whatever a policy does."""

import random
from typing import Any

from aioserve.request import RequestStatus
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


class ComparesNothing:
    """A key that no other can be compared with."""

    def __lt__(self, other: Any) -> bool:
        raise ValueError("planted in a comparison")


class Raising(BaseScheduler):
    """Raises in one `place`, with the probability `chance`; else sound, but for some preemptions.

    After 2,000 questions it has had enough, unless it raises for ever.
    """

    place = ""
    chance = 0.3

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._random = random.Random(self.kv_cache.pool.num_blocks)
        self._num_asked = 0

    def _may_raise(self, place: str) -> bool:
        if place != self.place:
            return False
        self._num_asked += 1
        is_tired = self.chance < 1 and self._num_asked > 2000
        return not is_tired and self._random.random() < self.chance

    def _raise(self, place: str) -> None:
        if self._may_raise(place):
            raise ValueError(f"planted in {place}")

    def order(self, request: Request) -> Any:
        is_new = request.status is RequestStatus.WAITING
        self._raise("order of the new" if is_new else "order of the preempted")
        key = "key of the new" if is_new else "key of the preempted"
        return ComparesNothing() if self._may_raise(key) else request.arrival_time

    def victim(self) -> Request | None:
        self._raise("victim")
        return None if self._may_raise("no victim") else super().victim()

    def schedule(self) -> SchedulerOutput:
        self._raise("begin")
        step = self.new_step()
        for request in self.running:
            if self.num_steps % 5 == 4 and self._random.random() < 0.3:
                step.preempt(request)
            step.run(request)
        self._raise("middle")
        for request in self.waiting:
            if not step.admit(request):
                break
        self._raise("last")
        output = step.output()
        self._raise("end")
        return output


PLACES = (
    *("order of the new", "order of the preempted", "key of the new", "key of the preempted"),
    *("victim", "no victim", "begin", "middle", "last", "end"),
)


def raising(place: str, chance: float) -> type[BaseScheduler]:
    """A policy that raises there; 1.0 is for ever."""
    return type("Raising", (Raising,), {"place": place, "chance": chance})
