"""Which replica can find which blocks, from what the engines' KV caches say of themselves.

Knows hashes of blocks and names of replicas. Does not know tokens, nor which replica is busy.
"""

from collections.abc import Sequence
from itertools import compress

from aioserve.kv_cache.block_pool import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

# A replica with more blocks than this is known by its newest: some 100 bytes each.
MAX_BLOCKS = 1_000_000


class PrefixIndex:
    """By block hash, a set of replicas, as the bits of a number: a thousand of them are 125 bytes,
    and what two blocks have in common is one operation.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        """`max_blocks` is the most that is kept of one replica; the oldest is forgotten first."""
        self._max_blocks = max_blocks
        self._holders: dict[bytes, int] = {}
        self._places: dict[str, int] = {}  # of a replica's bit
        self._names: list[str] = []  # by place; "" is free
        self._blocks: list[dict[bytes, None]] = []  # by place, oldest first

    def __len__(self) -> int:
        """Blocks that are known, counted at every replica that has them."""
        return sum(map(len, self._blocks))

    def apply(self, name: str, event: KVEvent) -> None:
        """Take in what the KV cache of a replica has said."""
        if isinstance(event, BlockStored):
            self.add(name, event.block_hash)
        elif isinstance(event, BlockRemoved):
            self.remove(name, event.block_hash)
        elif isinstance(event, AllBlocksCleared):
            self.forget(name)

    def add(self, name: str, block_hash: bytes) -> None:
        """The replica can find this block now."""
        place = self._places.get(name)
        if place is None:
            place = self._enter(name)
        blocks = self._blocks[place]
        if block_hash not in blocks:
            if len(blocks) >= self._max_blocks:
                self.remove(name, next(iter(blocks)))
            blocks[block_hash] = None
            self._holders[block_hash] = self._holders.get(block_hash, 0) | 1 << place

    def remove(self, name: str, block_hash: bytes) -> None:
        """The replica cannot find it any more; if it never could, nothing changes."""
        place = self._places.get(name)
        if place is not None and block_hash in self._blocks[place]:
            del self._blocks[place][block_hash]
            self._clear_bit(block_hash, place)

    def forget(self, name: str) -> None:
        """The replica can find nothing any more."""
        place = self._places.pop(name, None)
        if place is not None:
            for block_hash in self._blocks[place]:
                self._clear_bit(block_hash, place)
            self._blocks[place] = {}
            self._names[place] = ""

    def longest(self, block_hashes: Sequence[bytes]) -> tuple[int, list[str]]:
        """How many of these blocks, from the first on, some replica can find without a gap; and
        the names of those that can find as many. `(0, [])` if none has the first.
        """
        holders = self._holders
        count, mask = 0, -1
        for block_hash in block_hashes:
            common = mask & holders.get(block_hash, 0)
            if not common:
                break
            mask = common
            count += 1
        return (count, self._names_of(mask)) if count else (0, [])

    def num_blocks_by_name(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """How many of these blocks, from the first on, each replica can find; without those that
        cannot find the first.
        """
        holders, found = self._holders, dict[str, int]()
        if not block_hashes:
            return found
        mask = holders.get(block_hashes[0], 0)
        for count, block_hash in enumerate(block_hashes):
            common = mask & holders.get(block_hash, 0)
            if common != mask:  # some can find `count` blocks and no more
                found.update(dict.fromkeys(self._names_of(mask ^ common), count))
                mask = common
            if not mask:
                return found
        found.update(dict.fromkeys(self._names_of(mask), len(block_hashes)))
        return found

    def _names_of(self, mask: int) -> list[str]:
        bits = bin(mask)[:1:-1]  # the first is that of place 0
        return list(compress(self._names, map("1".__eq__, bits)))

    def num_blocks(self, name: str, block_hashes: Sequence[bytes]) -> int:
        """How many of these blocks, from the first on, this replica can find."""
        place = self._places.get(name)
        if place is None:
            return 0
        blocks, count = self._blocks[place], 0
        for block_hash in block_hashes:
            if block_hash not in blocks:
                break
            count += 1
        return count

    def _enter(self, name: str) -> int:
        """The lowest free place, so that numbers stay as short as the fleet."""
        if "" in self._names:
            place = self._names.index("")
            self._names[place] = name
        else:
            place = len(self._names)
            self._names.append(name)
            self._blocks.append({})
        self._places[name] = place
        return place

    def _clear_bit(self, block_hash: bytes, place: int) -> None:
        mask = self._holders[block_hash] & ~(1 << place)
        if mask:
            self._holders[block_hash] = mask
        else:
            del self._holders[block_hash]
