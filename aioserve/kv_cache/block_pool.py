"""A fixed pool of KV blocks: how many requests hold each, which are free, which are found by hash.

Blocks are found by hashes of their contents and of all that is before them: tokens, salts, adapters
and encoder inputs. They are the same in every process: files go by them. The pool knows nothing
about requests, and calls no observer: events of what becomes findable and what is lost, for routers
that send a request where its prefix is, are noted until they are taken. Last, leases.
"""

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache, lru_cache
from hashlib import blake2b
from itertools import takewhile
from operator import attrgetter
from struct import pack
from typing import NamedTuple

import msgspec

from aioserve.errors import InvariantError, PolicyError
from aioserve.request import Request

HASH_BYTES = 16
#: The name of the pool of KV blocks; other pools are called as their resource is.
BLOCKS = "blocks"
_end = attrgetter("end")


def hash_blocks(request: Request, num_blocks: int, size: int) -> None:
    """Extend `request.block_hashes` to `num_blocks` blocks of `size` tokens: each hash covers
    its block and, by chaining, all before.

    A cryptographic hash, since equal hashes share memory between strangers.
    """
    hashes = request.block_hashes
    start, end = len(hashes) * size, num_blocks * size
    if start >= end:
        return
    parent = hashes[-1] if hashes else _root(request.cache_salt, request.adapter_id)
    data, width = pack(f"<{end - start}I", *request.token_ids[start:end]), 4 * size
    for offset in range(0, len(data), width):
        block = parent + data[offset : offset + width]
        if request.encoder_inputs:
            position = start + offset // 4
            block += _encoder_key(request, position, position + size)
        parent = blake2b(block).digest()[:HASH_BYTES]
        hashes.append(parent)


@lru_cache(maxsize=64)
def _root(cache_salt: str, adapter_id: str) -> bytes:
    """Return what must match besides tokens: salt and adapter; the length keeps them apart."""
    salt, adapter = cache_salt.encode(), adapter_id.encode()
    return blake2b(b"%d:%b%b" % (len(salt), salt, adapter)).digest()[:HASH_BYTES]


def _encoder_key(request: Request, start: int, end: int) -> bytes:
    """Contents of the encoder inputs that reach into tokens `start` to `end`, and where."""
    items = request.encoder_inputs  # in order; a video has many
    first = bisect_right(items, start, key=_end)
    reaching = takewhile(lambda item: item.position < end, items[first:])
    return b"".join(
        b"|%d:%b" % (item.position - start, item.content_hash.encode()) for item in reaching
    )


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """A full block became findable; a step that is scheduled already computes it."""

    block_hash: bytes
    parent_hash: bytes | None  # of the block before it; None for the first
    token_ids: list[int]


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """A block was evicted, or will not be computed after all."""

    block_hash: bytes


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


def tell_stored(
    request: Request, first: int, end: int, block_size: int, lookup: Callable[[bytes], int | None]
) -> Iterator[BlockStored]:
    """Yield those of the blocks `first` to `end` of the request that are not there yet."""
    hashes = request.block_hashes
    for i in range(first, end):
        if lookup(hashes[i]) is None:
            tokens = request.token_ids[i * block_size : (i + 1) * block_size]
            yield BlockStored(hashes[i], hashes[i - 1] if i else None, tokens)


# What else the pool's side of a connector is: the connector itself is loaded where there is one.


class ExternalPrefix(NamedTuple):
    """The tokens of a request that are held elsewhere, behind what the prefix cache has, and their
    price.
    """

    num_tokens: int
    load_seconds: float  # to copy it into the paged cache
    compute_seconds: float  # to compute it instead; 0: not known yet


class OffloadPrice(NamedTuple):
    """The tokens of a request that can be kept in host memory, and what that costs."""

    num_tokens: int  # that would be kept, in whole blocks; 0: it cannot be offloaded now
    save_seconds: float  # to copy what is not there yet
    load_seconds: float  # to copy all of it back
    compute_seconds: float  # to compute it again in place of that; 0: not known yet


class BlockNotes:
    """The notes of the block pool for a connector: contents by hash, with their block. The
    connector takes them. None: the connector wants none of that kind.
    """

    def __init__(self, *, stored: bool = False, evicted: bool = False) -> None:
        self.stored: dict[bytes, int] | None = {} if stored else None  # became findable
        self.evicted: dict[bytes, int] | None = {} if evicted else None  # intact until a step runs

    def clear(self) -> None:
        """Forget all notes: none of them counts any more."""
        for notes in (self.stored, self.evicted):
            if notes is not None:
                notes.clear()


# The last first. Made once for all pools: of a thousand simulated ones, they would be half.
_all_blocks = cache(lambda num_blocks: tuple(range(num_blocks - 1, -1, -1)))


class BlockPool:
    """Reference-counted blocks with an index of full blocks by content hash.

    A block is in exactly one of three places: held (reference count > 0), `_unused` (free and not
    in the index), or `evictable` (free, still in the index, least recently freed first). Unused
    blocks are handed out first, so the index lives as long as memory allows. A call that would
    break this raises `InvariantError`.
    """

    def __init__(
        self,
        num_blocks: int,
        events: list[KVEvent] | None = None,
        notes: BlockNotes | None = None,
    ) -> None:
        """To `events` is appended every content that leaves the index; `notes` say what they are
        kept for.
        """
        self._events = events
        self._notes = notes = notes or BlockNotes()
        self._stored, self._evicted = notes.stored, notes.evicted
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks  # that `allocate` can hand out, evicting if need be
        self.ref_counts = [0] * num_blocks
        self._unused = list(_all_blocks(num_blocks))
        # Entries of blocks that were found again stay in it, and are counted by block in _stale: a
        # block's first entries are the stale ones. Cheaper than to unlink a block from the middle.
        self.evictable: deque[int] = deque()
        self._stale: dict[int, int] = {}
        self._num_stale = 0
        # Has as many listed as are to be evicted, in its order, or all (None); None: by age.
        self.arrange: Callable[[int | None], None] | None = None
        self._index: dict[bytes, int] = {}
        self.contents: list[bytes | None] = [None] * num_blocks  # per block: its key in _index

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that a request or connector holds."""
        return self.num_blocks - self.num_free_blocks

    @property
    def num_unused_blocks(self) -> int:
        """Number of free blocks without cached content."""
        return len(self._unused)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks off the free list, evicting cached ones last, oldest first."""
        if not 0 <= num_blocks <= self.num_free_blocks:
            raise InvariantError(
                f"{num_blocks} KV blocks are asked for, {self.num_free_blocks} are free"
            )
        unused, ref_counts = self._unused, self.ref_counts
        if num_blocks == 1 and unused:  # for a decode
            block_id = unused.pop()
            ref_counts[block_id] = 1
            self.num_free_blocks -= 1
            return [block_id]
        num_lacking = num_blocks - len(unused)
        if num_lacking <= 0:
            block_ids = unused[: -num_blocks - 1 : -1]
            del unused[len(unused) - num_blocks :]
        else:
            if self.arrange is not None:
                self.arrange(num_lacking)  # if it raises, nothing has changed
            block_ids = unused[::-1]
            unused.clear()
            self._evict(num_lacking, block_ids)
        self.num_free_blocks -= num_blocks
        for block_id in block_ids:
            ref_counts[block_id] = 1
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to blocks found by `lookup`."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                if self.contents[block_id] is None:
                    raise InvariantError(f"block {block_id} is not held and has no content")
                self._stale[block_id] = self._stale.get(block_id, 0) + 1
                self._num_stale += 1
                self.num_free_blocks -= 1
            self.ref_counts[block_id] += 1
        if self._num_stale > self.num_blocks:  # so that they cost no more than blocks do
            self.evictable = deque(self._take_evictable())

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop one reference each. What is given first is evicted first."""
        ref_counts, hashes = self.ref_counts, self.contents
        unused, evictable = self._unused, self.evictable
        num_entries = len(unused) + len(evictable)
        try:
            for block_id in block_ids:
                count = ref_counts[block_id] - 1
                if count < 0:
                    raise InvariantError(f"block {block_id} is freed, but no request holds it")
                ref_counts[block_id] = count
                if not count:
                    (unused if hashes[block_id] is None else evictable).append(block_id)
        finally:  # those before it are free now
            self.num_free_blocks += len(unused) + len(evictable) - num_entries

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the block with this content, held or free; None if there is none."""
        return self._index.get(block_hash)

    def register(self, block_ids: Iterable[int], block_hashes: Iterable[bytes]) -> None:
        """Make held, full blocks findable; of equal contents the first block wins."""
        index, hashes = self._index, self.contents
        for block_id, block_hash in zip(block_ids, block_hashes, strict=True):
            if block_hash not in index:
                if not self.ref_counts[block_id]:
                    raise InvariantError(f"block {block_id} gets content, but no request holds it")
                index[block_hash] = block_id
                hashes[block_id] = block_hash
                if self._stored is not None:
                    self._stored[block_hash] = block_id

    def unregister(self, block_id: int) -> None:
        """Make a held block unfindable, because it will not be computed after all."""
        if not self.ref_counts[block_id]:
            raise InvariantError(f"block {block_id} loses its content, but no request holds it")
        self.forget_blocks([block_id])

    def forget(self, block_hashes: Iterable[bytes]) -> None:
        """Make these contents unfindable, wherever they are: they were not computed after all."""
        lost = {b: found for found in block_hashes if (b := self._index.get(found)) is not None}
        if any(not self.ref_counts[block_id] for block_id in lost):
            kept = self._take_evictable()
            self._unused.extend(block_id for block_id in reversed(kept) if block_id in lost)
            self.evictable.extend(block_id for block_id in kept if block_id not in lost)
        for block_id, block_hash in lost.items():
            del self._index[block_hash]
            self.contents[block_id] = None
            if self._stored is not None:
                self._stored.pop(block_hash, None)
            if self._events is not None:
                self._events.append(BlockRemoved(block_hash))

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Make what these blocks hold unfindable: it was not loaded or computed after all."""
        self.forget([found for i in block_ids if (found := self.contents[i]) is not None])

    def clear_index(self) -> None:
        """Forget all content; held blocks stay held."""
        self._unused.extend(reversed(self._take_evictable()))
        self._index.clear()
        self.contents = [None] * self.num_blocks
        self._notes.clear()
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def list_evictable(self, block_ids: list[int]) -> None:
        """Let `evictable` be these blocks, with no stale entries."""
        self.evictable = deque(block_ids)
        self._stale, self._num_stale = {}, 0

    def _evict(self, num_blocks: int, block_ids: list[int]) -> None:
        """Append the blocks that were freed first, now without content, to `block_ids`."""
        evictable, stale, index, hashes = self.evictable, self._stale, self._index, self.contents
        while num_blocks:
            block_id = evictable.popleft()
            if block_id in stale and self._is_stale(block_id):
                continue
            block_hash = hashes[block_id]
            if block_hash is None:
                raise InvariantError(f"block {block_id} is to be evicted, but has no content")
            hashes[block_id] = None
            del index[block_hash]
            block_ids.append(block_id)
            num_blocks -= 1
            if self._evicted is not None:
                self._evicted[block_hash] = block_id
            if self._stored is not None:  # it is overwritten before it could be saved
                self._stored.pop(block_hash, None)
            if self._events is not None:
                self._events.append(BlockRemoved(block_hash))

    def _is_stale(self, block_id: int) -> bool:
        """Return whether the entry of it that was just taken from the front is stale; if so, forget
        it.
        """
        count = self._stale.pop(block_id, 0)
        if count > 1:
            self._stale[block_id] = count - 1
        self._num_stale -= count > 0
        return count > 0

    def _take_evictable(self) -> list[int]:
        """Return all that can be evicted, oldest first; `evictable` is empty then."""
        if self.arrange is not None:
            self.arrange(None)
        block_ids = [block_id for block_id in self.evictable if not self._is_stale(block_id)]
        self.evictable.clear()
        return block_ids


# Leases: prefixes that a policy or a client keeps until a time. A lease holds its blocks as a
# request does, so that no other request gets them, but gives way to a request beside which nothing
# runs. (Continuum, Li et al., 2025, pins a program's prefix while its tool runs.)


class LeaseLimits(NamedTuple):
    """The most KV blocks of leases; a block of several leases counts for each of them."""

    of_policy: int
    of_clients: int  # all clients together


class Lease(NamedTuple):
    """Blocks that are kept until a time."""

    conversation: Hashable
    block_ids: list[int]
    until: float  # seconds of the scheduler's clock
    client: str | None = None  # name of the API key that asked for it; None: the policy did

    @property
    def key(self) -> Hashable:
        """The lease's place: a client and the policy may keep the same conversation."""
        return self.conversation if self.client is None else (self.client, self.conversation)


class Leases:
    """The leases of one pool, the oldest first. A conversation has one lease of the policy, and one
    of each client, for which `client_leases` has the rules.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.max_blocks = pool.num_blocks  # that the policy's leases hold at most
        self.max_client_blocks = pool.num_blocks  # that the clients' leases hold at most
        self.pool = pool
        self.held: dict[Hashable, Lease] = {}  # what is asked in every step: a dict is cheap
        self.references: Counter[int] = Counter()  # how many leases hold each block, by block
        self.client_rule: Callable[[Leases], bool] = lambda leases: False  # how theirs give way
        self._num_blocks = 0  # of the policy's leases
        self._next_end = math.inf  # no lease ends before

    def __len__(self) -> int:
        return len(self.held)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that leases hold, and no request does. Costs time with each block of a lease."""
        return sum(self.pool.ref_counts[b] == count for b, count in self.references.items())

    def has_alone(self, block_ids: Iterable[int]) -> bool:
        """Return whether leases hold one of these blocks, and no request does."""
        counts, own = self.pool.ref_counts, self.references
        return any(counts[block_id] == own[block_id] for block_id in block_ids)

    def pin(self, conversation: Hashable, block_ids: list[int], until: float) -> int:
        """Hold these cached blocks until a time, or as many of the first as `max_blocks` allows, in
        the place of what the policy has held of the conversation; its older leases end where there
        is no room beside them. Returns how many are held. Raises `PolicyError` for a time that
        never comes.
        """
        if not math.isfinite(until):
            raise PolicyError(f"pin() takes a time of the clock in seconds, got {until!r}")
        block_ids = block_ids[: self.max_blocks]
        self.pool.touch(block_ids)
        self.end(conversation)
        while self._num_blocks + len(block_ids) > self.max_blocks:
            self._end_oldest()
        self.add(Lease(conversation, block_ids, until))
        return len(block_ids)

    def add(self, lease: Lease) -> None:
        """Note a lease of blocks that were touched for it; one of no block is none."""
        if lease.block_ids:
            self.held[lease.key] = lease
            self._num_blocks += len(lease.block_ids) if lease.client is None else 0
            self.references.update(lease.block_ids)
            self._next_end = min(self._next_end, lease.until)

    def end(self, key: Hashable) -> None:
        """Let go of what the policy holds of a conversation, or what another key holds, if
        anything: it stays cached until it is evicted.
        """
        if (lease := self.held.pop(key, None)) is not None:
            self._num_blocks -= len(lease.block_ids) if lease.client is None else 0
            self.references.subtract(lease.block_ids)
            for block_id in lease.block_ids:
                if not self.references[block_id]:
                    del self.references[block_id]
            self.pool.free(reversed(lease.block_ids))  # the head of a prefix is evicted last

    def give_way(self) -> bool:
        """End a lease: one of a client that frees something, else the oldest of the policy. False:
        there is none.
        """
        return self.give_way_of_clients() or self._end_oldest()

    def give_way_of_clients(self) -> bool:
        """End a lease of a client, if one frees a block. False: none does."""
        return self.client_rule(self)

    def _end_oldest(self) -> bool:
        """End the oldest lease of the policy. False: it has none."""
        for key, lease in self.held.items():
            if lease.client is None:
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
        """Return the earlier one of that time and the one at which a lease ends; None: neither
        is.
        """
        if not self.held:
            return due
        return self._next_end if due is None else min(due, self._next_end)

    def limit(self, limits: LeaseLimits) -> None:
        """Bound the KV blocks of the leases that come from now on."""
        self.max_blocks, self.max_client_blocks = limits

    def begin_anew(self, limits: LeaseLimits) -> None:
        """End all leases, and bound the KV blocks of later ones."""
        self.end_all()
        self.limit(limits)

    def end_all(self) -> None:
        """End all leases: their KV blocks can be evicted again."""
        for key in list(self.held):
            self.end(key)
