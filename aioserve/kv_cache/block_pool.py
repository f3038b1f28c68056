"""A fixed pool of KV blocks: who holds them, which are free, which can be found by hash.

Knows block ids, reference counts and hashes. Knows nothing about requests or tokens.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice

from aioserve.kv_cache.events import AllBlocksCleared, BlockRemoved, KVEvent


class BlockPool:
    """Reference-counted blocks with an index of full blocks by content hash.

    A block is in exactly one of three places: held (reference count > 0), `_unused` (free and not
    in the index), or `_evictable` (free, still in the index, least recently freed first). Unused
    blocks are handed out first, so the index lives as long as memory allows.
    """

    def __init__(self, num_blocks: int, on_event: Callable[[KVEvent], None] | None = None) -> None:
        """`on_event` hears of every content that leaves the index."""
        self._on_event = on_event
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._unused = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._index: dict[bytes, int] = {}
        self._hashes: list[bytes | None] = [None] * num_blocks  # per block: its key in _index

    @property
    def num_free_blocks(self) -> int:
        """Blocks that `allocate` can hand out, evicting from the index if need be."""
        return len(self._unused) + len(self._evictable)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free_blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks off the free list, evicting cached ones last, oldest first."""
        assert num_blocks <= self.num_free_blocks, "callers check num_free_blocks first"
        num_unused = min(num_blocks, len(self._unused))
        block_ids = self._unused[: -num_unused - 1 : -1]
        del self._unused[len(self._unused) - num_unused :]
        if num_blocks > num_unused:
            block_ids += self._evict(num_blocks - num_unused)
        ref_counts = self.ref_counts
        for block_id in block_ids:
            ref_counts[block_id] = 1
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to blocks found by `lookup`."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                del self._evictable[block_id]
            self.ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference each. What is given first is evicted first."""
        ref_counts, hashes, evictable = self.ref_counts, self._hashes, self._evictable
        for block_id in block_ids:
            ref_counts[block_id] = count = ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} freed twice"
            if count == 0:
                if hashes[block_id] is None:
                    self._unused.append(block_id)
                else:
                    evictable[block_id] = None

    def lookup(self, block_hash: bytes) -> int | None:
        """The block with this content, held or free; None if there is none."""
        return self._index.get(block_hash)

    def register(self, block_ids: Iterable[int], block_hashes: Iterable[bytes]) -> None:
        """Make held, full blocks findable; of equal contents the first block wins."""
        index, hashes = self._index, self._hashes
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if block_hash not in index:
                index[block_hash] = block_id
                hashes[block_id] = block_hash

    def unregister(self, block_id: int) -> None:
        """Make a held block unfindable, because it will not be computed after all."""
        assert self.ref_counts[block_id] > 0
        if (block_hash := self._hashes[block_id]) is not None:
            self._hashes[block_id] = None
            del self._index[block_hash]
            if self._on_event is not None:
                self._on_event(BlockRemoved(block_hash))

    def clear_index(self) -> None:
        """Forget all content; held blocks stay held."""
        self._unused.extend(reversed(self._evictable))
        self._evictable.clear()
        self._index.clear()
        self._hashes = [None] * self.num_blocks
        if self._on_event is not None:
            self._on_event(AllBlocksCleared())

    def _evict(self, num_blocks: int) -> list[int]:
        """The blocks that were freed first, now without content."""
        evictable, index, hashes = self._evictable, self._index, self._hashes
        block_ids = list(islice(evictable, num_blocks))
        for block_id in block_ids:
            del evictable[block_id]
            block_hash = hashes[block_id]
            assert block_hash is not None
            hashes[block_id] = None
            del index[block_hash]
            if self._on_event is not None:
                self._on_event(BlockRemoved(block_hash))
        return block_ids
