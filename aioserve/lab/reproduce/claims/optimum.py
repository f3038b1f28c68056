"""The least total latency that any schedule could have, with hindsight, of a few requests.

The model of Jaillet et al., "Online Scheduling for LLM Inference with KV Cache Constraints", 2025:
a request holds its prompt and what it has generated, gets a token in each round once it has begun,
and is not interrupted. As in this engine, the last token of a reply needs no memory. The paper
solves an integer program; here branch and bound goes through the rounds, which ends soon for some
seven requests.
"""

import math
from typing import NamedTuple


class Job(NamedTuple):
    """A request: when it comes, its prompt, and its reply, in rounds and tokens."""

    arrival: int
    prompt: int
    output: int

    @property
    def area(self) -> int:
        """Tokens that it holds, summed over its rounds."""
        return self.prompt * self.output + self.output * (self.output - 1) // 2


def total_latency(jobs: list[Job], memory: int, at_most: float = math.inf) -> float:
    """Return the least sum of rounds from arrival to last token; `at_most` if nothing is below it.

    `memory` is in tokens. In its first round a request holds its prompt, in each one token more.
    """
    return _Search(jobs, memory, at_most).best


class _Search:
    """Goes through the rounds; in each, through the sets of requests that could begin."""

    def __init__(self, jobs: list[Job], memory: int, at_most: float) -> None:
        self.memory, self.best = memory, at_most
        self.horizon = max(j.arrival for j in jobs) + sum(j.output for j in jobs)
        ordered = tuple(sorted(jobs, key=lambda j: (j.output, j.prompt, j.arrival)))
        self._go(0, ordered, 0.0, [0] * (2 * self.horizon + 2), 0)

    def _go(
        self, now: int, waiting: tuple[Job, ...], cost: float, use: list[int], first: int
    ) -> None:
        """Choose which of `waiting`, from the place `first` on, begin in the round `now`."""
        if cost + self._bound(now, waiting, use) >= self.best:
            return
        if not waiting:
            self.best = cost
            return
        for place in range(first, len(waiting)):
            job = waiting[place]
            if place > first and job == waiting[place - 1]:
                continue  # equal requests: the first of them goes first
            if job.arrival > now or not self._fits(use, now, job):
                continue
            more = use.copy()
            for k in range(job.output):
                more[now + k] += job.prompt + k
            rest = waiting[:place] + waiting[place + 1 :]
            self._go(now, rest, cost + now - job.arrival + job.output, more, place)
        if now < self.horizon:
            self._go(now + 1, waiting, cost, use, 0)

    def _fits(self, use: list[int], now: int, job: Job) -> bool:
        return all(use[now + k] + job.prompt + k <= self.memory for k in range(job.output))

    def _bound(self, now: int, waiting: tuple[Job, ...], use: list[int]) -> float:
        """No schedule of `waiting` costs less: the k-th of them to end does so no sooner than the
        k-th would if all began at once, nor before the k smallest areas had room.
        """
        ends = sorted(max(j.arrival, now) + j.output for j in waiting)
        total, room, at, needed = 0, 0, now, 0
        for end, area in zip(ends, sorted(j.area for j in waiting), strict=True):
            needed += area
            while room < needed and at < len(use):
                room += self.memory - use[at]
                at += 1
            total += max(end, at)
        return total - sum(j.arrival for j in waiting)
