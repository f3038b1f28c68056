"""Leases: cached prefixes that stay for a time because a policy has pinned them.

A lease holds its blocks as a request does, so that no other request gets them; but it gives way to
a request that nothing else runs beside. Knows blocks and times; which prefix is worth a lease, the
policy knows. (Continuum, Li et al., 2025, pins a program's prefix while its tool runs.)
"""

import math
from collections import Counter
from collections.abc import Hashable
from typing import NamedTuple

from aioserve.errors import PolicyError
from aioserve.kv_cache.block_pool import BlockPool


class _Lease(NamedTuple):
    block_ids: list[int]
    until: float  # seconds of the scheduler's clock


class Leases:
    """The leases of one pool, by key, the oldest first; a key has one lease."""

    def __init__(self, pool: BlockPool) -> None:
        self.max_blocks = pool.num_blocks  # that all leases hold at most, shared ones counted twice
        self._pool = pool
        self.held: dict[Hashable, _Lease] = {}  # what is asked in every step: a dict is cheap
        self._num_blocks = 0
        self._next_end = math.inf  # no lease ends before

    def __len__(self) -> int:
        return len(self.held)

    @property
    def references(self) -> Counter[int]:
        """By block: how many leases hold it."""
        return Counter(b for lease in self.held.values() for b in lease.block_ids)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that leases hold, and no request does."""
        own = self.references
        return sum(self._pool.ref_counts[b] == count for b, count in own.items())

    def pin(self, key: Hashable, block_ids: list[int], until: float) -> int:
        """Hold these cached blocks until a time, or as many of the first as `max_blocks` allows, in
        the place of what the key has held; older leases end where there is no room beside them.
        Returns how many are held. Raises `PolicyError` for a time that never comes.
        """
        if not math.isfinite(until):
            raise PolicyError(f"pin() takes a time of the clock in seconds, got {until!r}")
        block_ids = block_ids[: self.max_blocks]
        self._pool.touch(block_ids)
        self.end(key)
        while self.held and self._num_blocks + len(block_ids) > self.max_blocks:
            self.give_way()
        if block_ids:
            self.held[key] = _Lease(block_ids, until)
            self._num_blocks += len(block_ids)
            self._next_end = min(self._next_end, until)
        return len(block_ids)

    def end(self, key: Hashable) -> None:
        """Let go of what the key holds, if anything: it stays cached until it is evicted."""
        if (lease := self.held.pop(key, None)) is not None:
            self._num_blocks -= len(lease.block_ids)
            self._pool.free(reversed(lease.block_ids))  # the head of a prefix is evicted last

    def give_way(self) -> bool:
        """End the oldest lease. False: there is none."""
        for key in self.held:
            self.end(key)
            return True
        return False

    def expire(self, now: float) -> None:
        """End the leases whose time has passed."""
        if now < self._next_end:
            return
        for key in [key for key, lease in self.held.items() if lease.until <= now]:
            self.end(key)
        self._next_end = min((lease.until for lease in self.held.values()), default=math.inf)

    def next_due(self, due: float | None) -> float | None:
        """The earlier one of that time and the one at which a lease ends; None: neither is."""
        if not self.held:
            return due
        return self._next_end if due is None else min(due, self._next_end)

    def begin_anew(self, max_blocks: int) -> None:
        """Let go of everything; from here on all leases hold this many blocks at most."""
        self.end_all()
        self.max_blocks = max_blocks

    def end_all(self) -> None:
        """Let go of everything."""
        while self.give_way():
            pass
