"""Clients that ask when a workload says: at a time, or after the end of all that they follow.

Knows arrivals and turns. A derived class says which engine they ask and what is kept of it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from aioserve.lab.workloads.workload import Workload, followers, replied_to

Progress = Callable[[int], None]  # told how many more requests have ended


class Clients(ABC):
    """The clients of a run. Times are those of `clock`, in seconds; `start` is its second 0."""

    def __init__(self, workload: Workload, clock: Callable[[], float], progress: Progress) -> None:
        self.workload = workload
        self.clock = clock
        self.start = clock()
        self.replies: dict[int, list[int]] = {}  # token ids, of those that later prompts hold
        self.is_replied_to = replied_to(workload.requests)
        self._progress = progress
        self._followers = followers(workload.requests)
        self._num_missing = [len(request.waits_for) for request in workload.requests]
        # By the time at which they come. They share a timer: asyncio fires timers of one time in
        # any order, and a fleet has them in order of the ends that they follow.
        self._coming: dict[float, list[int]] = {}

    @abstractmethod
    async def ask(self, i: int, due: float) -> list[int]:
        """Send request number `i`, which is `due` now; the token ids of its whole reply."""

    async def come(self) -> None:
        """Ask as the workload has it; returns when the last request has ended."""
        requests = self.workload.requests
        openers = [i for i, request in enumerate(requests) if request.follows < 0]
        openers.sort(key=lambda i: requests[i].arrival)
        async with asyncio.TaskGroup() as tasks:
            for i in openers:
                due = self.start + requests[i].arrival
                if due > self.clock():
                    await asyncio.sleep(due - self.clock())
                tasks.create_task(self._serve(i, due, tasks))

    async def _serve(self, i: int, due: float, tasks: asyncio.TaskGroup) -> None:
        """One request to its end, then those that follow it."""
        reply = await self.ask(i, due)
        if i in self.is_replied_to:
            self.replies[i] = reply
        self._progress(1)
        for follower in self._followers.get(i, ()):
            self._num_missing[follower] -= 1
            if self._num_missing[follower]:
                continue
            due = self.clock() + self.workload.requests[follower].arrival
            self._coming.setdefault(due, []).append(follower)
            if len(self._coming[due]) == 1:
                tasks.create_task(self._follow(due, tasks))

    async def _follow(self, due: float, tasks: asyncio.TaskGroup) -> None:
        await asyncio.sleep(due - self.clock())
        for i in self._coming.pop(due):
            tasks.create_task(self._serve(i, due, tasks))
