"""Which cached prefixes are evicted first, by ranks that a policy states. Loaded if one does.

Without ranks, the least recently used block is evicted first. `Ranking` is the order in which free
cached blocks are evicted when they have ranks: the smallest rank goes first, of equal ranks the
block that was freed first, and never a block before a free one behind it in its prefix; it costs
O(log n) for each block that is freed, ranked or evicted. `Retention` holds the ranks that one
policy states, for the KV cache and for what a connector keeps of it in host memory.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from operator import itemgetter
from typing import TypeAlias

from aioserve.errors import InvariantError, PolicyError
from aioserve.kv_cache.block_pool import BlockPool, hash_blocks
from aioserve.request import Request

MIN_COMPACTED = 64  # entries; a heap with fewer that are out of date is left as it is
_Entry: TypeAlias = tuple[float, int, bytes]  # rank, when it was freed, content


class Ranking:
    """Ranks of the cached contents of one pool, and a heap of those that are free.

    Blocks are freed and found again without a word to the heap: its entries are checked when they
    come to its top, and the pool's list of freed blocks is read before any block is evicted.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._ranks: dict[bytes, float] = {}
        self._before: dict[bytes, bytes] = {}  # which content stands before it in a prefix
        self._behind: dict[bytes, dict[bytes, None]] = {}  # those in the heap that stand behind it
        self._heap: list[_Entry] = []  # also entries that are out of date
        self._entries: dict[bytes, _Entry] = {}  # those that are not, by content
        self._num_freed = 0
        self.heir: Ranking | None = None  # of another pool: takes over the ranks of what is evicted

    def begin(self, settle: Callable[[], None] = lambda: None) -> None:
        """The pool evicts by these ranks from now on. `settle` is called before it does, for ranks
        that are still to be stated; if it raises, nothing is evicted.
        """
        self._settle = settle
        self._pool.arrange = self._arrange

    def end(self) -> None:
        """The pool evicts the least recently freed block first again. Ranks are kept."""
        self._arrange(None)
        self._pool.arrange = None

    def rank(self, contents: Sequence[bytes], rank: float) -> None:
        """Give cached contents this rank, in the place of what they have: the first blocks of one
        prefix, in order.
        """
        before: bytes | None = None
        for content in contents:
            self._ranks[content] = rank
            if before is not None:
                self._stand(content, before)
            before = content
            if (entry := self._entries.get(content)) is not None:
                self._push(rank, entry[1], content)
        if len(self._ranks) > 2 * self._pool.num_blocks + MIN_COMPACTED:
            self._forget_lost()

    def inherit(self, content: bytes, rank: float, before: bytes | None) -> None:
        """Take over the rank of a content that another pool has evicted, which may come here."""
        if len(self._ranks) > 2 * self._pool.num_blocks + MIN_COMPACTED:
            self._forget_lost()
        self._ranks[content] = rank
        if before is not None:
            self._stand(content, before)
        if (entry := self._entries.get(content)) is not None:
            self._push(rank, entry[1], content)

    def rank_of(self, content: bytes) -> float:
        """Return the rank of a cached content; minus infinity if none was stated."""
        return self._ranks.get(content, -math.inf)

    def _arrange(self, num_blocks: int | None) -> None:
        """Let the pool list the `num_blocks` blocks that are to be evicted now, and no others; or,
        given None, all that could be evicted, the one that was freed first at the head.
        """
        if num_blocks is not None:
            self._settle()
        pool = self._pool
        newest_first = dict.fromkeys(reversed(pool.evictable))  # of each block the last entry
        for block_id in reversed(newest_first):
            content = pool.contents[block_id]
            if content is not None and not pool.ref_counts[block_id]:
                self._num_freed += 1
                self._push(self.rank_of(content), self._num_freed, content)
        if num_blocks is not None:
            pool.list_evictable([self._pop() for _ in range(num_blocks)])
            return
        entries = sorted(self._entries.values(), key=itemgetter(1))
        pool.list_evictable([b for *_, c in entries if (b := self._free_block(c)) is not None])
        self._heap, self._entries, self._behind = [], {}, {}

    def _push(self, rank: float, freed: int, content: bytes) -> None:
        self._entries[content] = entry = (rank, freed, content)
        heappush(self._heap, entry)
        if (before := self._before.get(content)) is not None:
            self._behind.setdefault(before, {})[content] = None
        if len(self._heap) > 2 * self._pool.num_blocks + MIN_COMPACTED:
            for held in [c for c in self._entries if self._free_block(c) is None]:
                self._drop(held)
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def _pop(self) -> int:
        """Return the block to be evicted first, which is in the heap no more."""
        while self._heap:
            entry = heappop(self._heap)
            content = entry[2]
            if self._entries.get(content) is not entry:
                continue
            block_id = self._free_block(content)
            if block_id is None:
                self._drop(content)
            elif (behind := self._find_behind(content)) is not None:
                self._push_after(entry, behind)
            else:
                self._take(content)
                return block_id
        raise InvariantError("a KV block is to be evicted, and none is free")

    def _push_after(self, entry: _Entry, behind: _Entry) -> None:
        """The block of `entry`, which comes first by its own rank, has to wait for another."""
        _, freed, content = entry
        if freed <= behind[1]:
            self._num_freed += 1
            freed = self._num_freed
        self._push(behind[0], freed, content)

    def _take(self, content: bytes) -> None:
        """This content is evicted, so the one before it counts by its own rank again."""
        self._drop(content)
        rank, before = self._ranks.pop(content, None), self._before.pop(content, None)
        if self.heir is not None and rank is not None:
            self.heir.inherit(content, rank, before)
        if before is not None and (entry := self._entries.get(before)) is not None:
            if entry[0] != (own := self.rank_of(before)):
                self._push(own, entry[1], before)

    def _find_behind(self, content: bytes) -> _Entry | None:
        """Return the entry of a free block that stands behind this one in a prefix; None: there is
        none. It is not at the top of the heap, so it has the larger rank, or was freed later.
        """
        behind = self._behind.get(content)
        while behind:
            found = next(iter(behind))
            if self._free_block(found) is not None:
                return self._entries[found]
            self._drop(found)
        return None

    def _stand(self, content: bytes, before: bytes) -> None:
        """Note what stands before a content: another one, if a block between them has come or gone,
        which host memory may lose alone. The caller pushes the content if it is in the heap.
        """
        if self._before.get(content, before) != before:
            self._leave(content)
        self._before[content] = before

    def _drop(self, content: bytes) -> None:
        del self._entries[content]
        self._leave(content)

    def _leave(self, content: bytes) -> None:
        """Let a content stand behind none in the heap."""
        before = self._before.get(content)
        if before is not None and (behind := self._behind.get(before)) is not None:
            behind.pop(content, None)
            if not behind:
                del self._behind[before]

    def _forget_lost(self) -> None:
        """Drop the ranks of contents that were lost by other ways than eviction."""
        lookup, entries = self._pool.lookup, self._entries
        kept = {c for c in self._ranks if c in entries or lookup(c) is not None}
        self._ranks = {c: rank for c, rank in self._ranks.items() if c in kept}
        self._before = {c: before for c, before in self._before.items() if c in kept}

    def _free_block(self, content: bytes) -> int | None:
        block_id = self._pool.lookup(content)
        return None if block_id is None or self._pool.ref_counts[block_id] else block_id


class Retention:
    """The ranks that one policy states for the prefixes in one KV cache."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        policy_name: str,
        ask: Callable[[Request], float] | None,
        outside: BlockPool | None = None,
    ) -> None:
        """`ask` is `retention` of the policy: the rank of what a request has left in the cache.
        None: the policy states ranks by `rank` alone. `outside` are the slots of host memory for KV
        blocks, in which the same ranks decide; None: there are none.
        """
        self._pool = pool
        self._block_size = block_size  # tokens
        self._policy_name = policy_name
        self._ask = ask
        self.ranking = Ranking(pool)
        self._outside = outside
        if outside is not None:
            self.ranking.heir = Ranking(outside)
        self.freed: deque[Request] = deque()  # have given up their blocks, to be asked about

    @staticmethod
    def replace(old: "Retention | None", new: "Retention | None") -> "Retention | None":
        """Let the ranks of `new` decide in the place of those of `old`, None: the age alone.
        Returns `new`.
        """
        if old is not new:
            if old is not None:
                old.freed.clear()
                old.ranking.end()
                if old.ranking.heir is not None:
                    old.ranking.heir.end()
            if new is not None:
                new.ranking.begin(new.settle)
                if new.ranking.heir is not None:
                    new.ranking.heir.begin()
        return new

    def note_freed(self, request: Request) -> None:
        """The request has given up its blocks, of which some are cached."""
        if self._ask is not None:
            self.freed.append(request)

    def settle(self) -> None:
        """Ask for the ranks of all that was given up. Raises what the policy does, and
        `PolicyError` for a rank that is no number; of the request for which it did, the blocks keep
        the rank that they had.
        """
        while self.freed and self._ask is not None:
            request = self.freed.popleft()
            contents = self._find_contents(request, request.num_tokens)
            if contents or self._find_outside(request, request.num_tokens):
                rank = self._ask(request)
                self._check(rank, request)
                self._rank(request, request.num_tokens, contents, rank)

    def rank(self, request: Request, rank: float, num_tokens: int | None) -> int:
        """Give the cached prefix of the request's first `num_tokens` tokens, None: of all, a rank.
        Returns the tokens that are cached. Raises `PolicyError` for a rank that is no number.
        """
        self._check(rank, request)
        limit = request.num_tokens if num_tokens is None else num_tokens
        contents = self._find_contents(request, limit)
        self._rank(request, limit, contents, rank)
        return len(contents) * self._block_size

    def _check(self, rank: object, request: Request) -> None:
        if not isinstance(rank, int | float) or rank != rank:
            raise PolicyError(
                f"policy {self._policy_name}: the retention of a request is a number, got "
                f"{rank!r:.100} for {request.request_id!r}"
            )

    def _rank(
        self, request: Request, num_tokens: int, contents: Sequence[bytes], rank: float
    ) -> None:
        """Rank what the KV cache has of a prefix, and what host memory has of it."""
        self.ranking.rank(contents, rank)
        if (heir := self.ranking.heir) is not None:
            heir.rank(self._find_outside(request, num_tokens), rank)

    def _find_outside(self, request: Request, num_tokens: int) -> list[bytes]:
        if (outside := self._outside) is None:
            return []
        num_blocks = max(min(request.num_tokens - 1, num_tokens), 0) // self._block_size
        hash_blocks(request, num_blocks, self._block_size)
        return [c for c in request.block_hashes[:num_blocks] if outside.lookup(c) is not None]

    def _find_contents(self, request: Request, num_tokens: int) -> list[bytes]:
        num_blocks = max(min(request.num_tokens - 1, num_tokens), 0) // self._block_size
        hash_blocks(request, num_blocks, self._block_size)
        found: list[bytes] = []
        for content in request.block_hashes[:num_blocks]:
            if self._pool.lookup(content) is None:
                break
            found.append(content)
        return found
