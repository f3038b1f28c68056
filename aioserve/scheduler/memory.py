"""What a policy can read of the KV cache's memory, in tokens and exactly: shared blocks count once.

Changes nothing.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aioserve.request import Request

if TYPE_CHECKING:
    from aioserve.kv_cache import KVCacheManager
    from aioserve.scheduler.table import RequestTable


class _Owner(Protocol):
    """The scheduler whose memory is read: its table is another one after a policy switch."""

    kv_cache: KVCacheManager
    book: RequestTable


class HeldPrefix(NamedTuple):
    """A lease: the prefix of a conversation that `pin` keeps."""

    user: str  # the client's name
    conversation: str  # the hint `session` of its requests, else the id of the request
    num_tokens: int  # of its blocks, those that other leases or requests hold, too, included
    until: float  # seconds of the clock


class Memory:
    """KV tokens of one cache. `total` is `free` and `held` and `leased` together."""

    def __init__(self, scheduler: _Owner) -> None:
        self._kv_cache, self._scheduler = scheduler.kv_cache, scheduler

    def _tokens(self, num_blocks: int) -> int:
        return num_blocks * self._kv_cache.block_size

    @property
    def total(self) -> int:
        """Tokens for which the pool has blocks."""
        return self._tokens(self._kv_cache.pool.num_blocks)

    @property
    def free(self) -> int:
        """Tokens for which requests can get blocks, cached prefixes evicted if need be."""
        return self._tokens(self._kv_cache.pool.num_free_blocks)

    @property
    def evictable(self) -> int:
        """Free tokens that are cached prefixes."""
        pool = self._kv_cache.pool
        return self._tokens(pool.num_free_blocks - pool.num_unused_blocks)

    @property
    def leased(self) -> int:
        """Tokens that leases hold, and no request does. Costs time with each block of a lease."""
        return self._tokens(self._kv_cache.leases.num_held_blocks)

    @property
    def held(self) -> int:
        """Tokens of the blocks that requests hold, or that a step in flight still writes."""
        return self._tokens(self._kv_cache.pool.num_used_blocks) - self.leased

    @property
    def paused(self) -> int:
        """Of the held tokens, those of paused requests, which give way before others; blocks that
        running requests share with them included. Costs time with each paused request.
        """
        return self._tokens(
            len({b for request in self._scheduler.book.paused for b in request.block_ids})
        )

    def leases(self, most: int | None = None) -> list[HeldPrefix]:
        """Return the leases of the policy (`pin`) and of clients, or `most` of them, each with its
        user, conversation, tokens and end; the newest first.
        """
        found = []
        for lease in islice(reversed(self._kv_cache.leases.held.values()), most):
            conversation: Any = lease.conversation  # `Request.conversation`
            _, user, name = conversation
            shown = name[0] if isinstance(name, tuple) else str(name)
            found.append(HeldPrefix(user, shown, self._tokens(len(lease.block_ids)), lease.until))
        return found

    def cached(self, request: Request) -> int:
        """Return tokens of the request's longest cached prefix. Costs time with its length;
        `kv_cache.estimate_cached_tokens` is cheaper and nearly as good.
        """
        return self._tokens(len(self._kv_cache.get_computed_blocks(request)))

    def own(self, request: Request) -> int:
        """Return tokens of the blocks that would become free if the running or paused request were
        preempted.
        """
        counts = self._kv_cache.pool.ref_counts
        return self._tokens(sum(counts[block_id] == 1 for block_id in request.block_ids))
