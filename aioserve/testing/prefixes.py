"""Which contents can be found in the KV cache, as its events tell, and whether prefixes have holes.

Knows events and free blocks. Does not know which request a content is of.
"""

import math
from collections.abc import Iterable

from aioserve.kv_cache import AllBlocksCleared, BlockPool, BlockStored, KVEvent, Retention
from aioserve.testing.violation import ContractViolation


class Prefixes:
    """The contents of one pool that its events have told to be there."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        #: By content that can be found: the one before it in its prefix.
        self.before: dict[bytes, bytes | None] = {}
        self._removed: set[bytes] = set()  # by the events that were taken last

    def take(self, events: Iterable[KVEvent]) -> None:
        """Take in what has happened since the last call."""
        self._removed.clear()
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.before.clear()
            elif isinstance(event, BlockStored):
                self.before[event.block_hash] = event.parent_hash
            else:
                self.before.pop(event.block_hash, None)
                self._removed.add(event.block_hash)

    def check_holes(self, where: str, retention: Retention) -> None:
        """Check that no block was evicted in the last plan before a free one behind it that has a
        rank. Raises `ContractViolation`.
        """
        for content, before in self.before.items() if self._removed else ():
            if before not in self._removed or before in self.before:
                continue
            block_id = self._pool.lookup(content)
            if block_id is None or self._pool.ref_counts[block_id]:
                continue
            if retention.ranking.rank_of(content) > -math.inf:
                raise ContractViolation(
                    f"{where}: the block before block {block_id}, which is cached and free, was "
                    "evicted first: a prefix has a hole"
                )

    def check_lost(self, where: str) -> None:
        """Check that all of them can still be found. Raises `ContractViolation`."""
        if lost := [content for content in self.before if self._pool.lookup(content) is None]:
            raise ContractViolation(
                f"{where}: {len(lost)} blocks left the prefix index without an event"
            )
