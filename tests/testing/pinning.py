"""Policies that pin and unpin at random, a lot: leases must hold and end whatever a day brings."""

import random
from typing import Any

from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler

from aioserve.scheduler import BaseScheduler, Request, SchedulerOutput
from tests.testing.hostile import HostileScheduler


class PinsAtRandom(BaseScheduler):
    """Before the policy that it is mixed into plans: leases for any request, of moments, some in
    the past; and when a request ends, for whatever reason.
    """

    seconds = 20.0  # for which a lease is to last at most: by the harness' clock, some steps

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dice = random.Random(self.kv_cache.pool.num_blocks)
        self.known: list[Request] = []  # that ran or have ended: the last of them

    def schedule(self) -> SchedulerOutput:
        self.known = [*self.known, *self.running][-8:]
        for _ in range(self.dice.randrange(3)):
            self._pin_any([*self.known, *self.waiting])
        return super().schedule()  # type: ignore[safe-super]

    def on_finish(self, request: Request, reason: str) -> None:
        if self.dice.random() < 0.8:
            self.pin(request, self._when())

    def _pin_any(self, requests: list[Request]) -> None:
        if not requests:
            return
        request = self.dice.choice(requests)
        if self.dice.random() < 0.7:
            self.pin(request, self._when())
        else:
            self.unpin(request)

    def _when(self) -> float:
        return self.clock() + self.dice.uniform(-0.1, 1) * self.seconds


class PinsInChunks(PinsAtRandom, ChunkedPrefillScheduler):
    """Plans as `chunked_prefill`."""


class PinsForMoments(PinsInChunks):
    """By the clock of a server: leases end while it runs on, and while it is idle."""

    seconds = 0.1


class PinsAndHates(PinsAtRandom, HostileScheduler):
    """Calls the verbs at random."""
