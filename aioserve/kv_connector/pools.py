"""The pools of which a connector keeps the contents, and how far a request can begin behind them.

Knows which of a request's blocks are in a pool, and which in host memory. Knows no steps.
"""

from collections.abc import Collection, Iterator, Sequence

from aioserve.kv_cache import BLOCKS, BlockNotes, KeptPool, Outside, reached_blocks
from aioserve.kv_connector.interface import SlotGroup
from aioserve.kv_connector.slots import PoolSlots
from aioserve.request import Request

#: Contents of one pool, by their hashes.
Contents = tuple[PoolSlots, list[bytes]]


class KeptPools:
    """Slots for each pool. KV blocks have to be there from the first on: in their pool, and behind
    those in host memory. What other pools need for that is in either place.
    """

    def __init__(
        self, groups: Sequence[SlotGroup], *, has_store: bool, saves: bool, loads: bool
    ) -> None:
        """With a store all that is computed is saved, without one what pools evict; if not `saves`,
        nothing is.
        """
        self._has_store, self._saves, self._loads = has_store, saves, loads
        self._kept: dict[str, PoolSlots] = {}  # by the name of the pool
        for group in groups:
            self._make(group)
        #: A model without attention has nothing in its KV blocks: they are as good as there.
        self.has_blocks = BLOCKS in self._kept
        self.blocks = self._kept.get(BLOCKS) or self._make(SlotGroup(BLOCKS, 0, 0))
        self.others: list[tuple[PoolSlots, KeptPool]] = []  # that have joined

    def __iter__(self) -> Iterator[PoolSlots]:
        return iter(self._kept.values())

    def join(self, pool: KeptPool) -> Outside:
        """A pool that requests need: that of the KV blocks, or another one."""
        kept = self._kept.get(pool.name) or self._make(SlotGroup(pool.name, 0, 0))
        kept.pool = pool
        if kept is not self.blocks:
            self.others.append((kept, pool))
        return kept

    def _make(self, group: SlotGroup) -> PoolSlots:
        """Slots behind those that are there; of none nothing is kept."""
        saves, first = self._saves and group.num_slots > 0, sum(k.slots.num_blocks for k in self)
        notes = BlockNotes(stored=saves and self._has_store, evicted=saves and not self._has_store)
        made = self._kept[group.name] = PoolSlots(group, first, notes, is_loaded=self._loads)
        return made

    def end_in_pool(self, hashes: Sequence[bytes], first: int) -> int:
        """Behind the last KV block that the pool has, from block `first` on without a gap: more
        than requests begin behind, where the state at the end is missing.
        """
        pool = self.blocks.pool
        if self.others and pool is not None:
            while first < len(hashes) and pool.lookup(hashes[first]) is not None:
                first += 1
        return first

    def end_in_slots(self, hashes: Sequence[bytes], first: int) -> int:
        """Behind the last KV block in host memory, from block `first` on without a gap."""
        if self.has_blocks:
            lookup = self.blocks.slots.lookup
            for i in range(first, len(hashes)):
                if lookup(hashes[i]) is None:
                    return i
        return max(first, len(hashes))

    def reached(
        self, request: Request, num_blocks: int, keys: Collection[bytes] = frozenset()
    ) -> int:
        """Behind how many of its first `num_blocks` blocks a request can begin by what pools beside
        that of the KV blocks have, or host memory, or a store that has `keys`.
        """
        before = -1
        while num_blocks != before:
            before = num_blocks
            for kept, pool in self.others:

                def is_there(block_hash: bytes, kept: PoolSlots = kept) -> bool:
                    return kept.is_there(block_hash) or kept.key(block_hash) in keys

                hashes = request.block_hashes
                num_blocks = reached_blocks(hashes, num_blocks, pool.needed, is_there)
        return num_blocks

    def needed(self, request: Request, num_blocks: int) -> list[Contents]:
        """What has to be there to begin behind the first `num_blocks` blocks: KV blocks first."""
        hashes = request.block_hashes
        found = [(self.blocks, hashes[:num_blocks])] if self.has_blocks else []
        others = ((kept, pool.needed(num_blocks)) for kept, pool in self.others)
        return [*found, *((kept, hashes[seen.start : seen.stop]) for kept, seen in others)]

    def num_bytes_to_load(self, request: Request, first: int, end: int) -> int:
        """Bytes that are loaded to begin behind the first `end` blocks, if the pool has the KV
        blocks before `first`.
        """
        num_bytes = (end - first) * self.blocks.block_bytes
        for kept, hashes in self.needed(request, end):
            if kept is not self.blocks and (pool := kept.pool) is not None:
                num_bytes += kept.block_bytes * sum(pool.lookup(h) is None for h in hashes)
        return num_bytes

    def missing(self, request: Request, first: int, end: int) -> list[Contents]:
        """What is neither in a pool nor in host memory of that; KV blocks are, before `first`.
        States and windows come first, as the rest is of no use without them.
        """
        wanted = []
        for kept, hashes in reversed(self.needed(request, end)):
            if kept is self.blocks:
                lacking = hashes[first:]
            else:
                lacking = [block_hash for block_hash in hashes if not kept.is_there(block_hash)]
            if lacking:
                wanted.append((kept, lacking))
        return wanted

    def to_find(self, request: Request, begin: int, end: int) -> list[bytes]:
        """By which keys a store may have what a request needs beside KV blocks to begin behind more
        than `begin` of its first `end` blocks.
        """
        hashes = request.block_hashes
        return [
            kept.key(hashes[i])
            for kept, pool in self.others
            for i in range(pool.needed(begin + 1).start, end)
            if not kept.is_there(hashes[i])
        ]
