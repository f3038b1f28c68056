"""What a policy can read of the KV cache's memory, and how it ranks what is evicted from it.

`Memory` counts in tokens and exactly: shared blocks count once; it changes nothing. `Ranks` asks
the policy's `retention` and checks the answers; which block is evicted first, the cache knows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aioserve.errors import PolicyError
from aioserve.request import Request

if TYPE_CHECKING:
    from aioserve.kv_cache import KVCacheManager
    from aioserve.kv_cache.retention import Retention
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


class Ranks:
    """The ranks of cached prefixes by which the policy named `policy_name` says what is evicted
    first; least recently used blocks go first until a rank is given. `ask` is `retention` of the
    policy; None: the policy does not have it.
    """

    def __init__(
        self, kv_cache: KVCacheManager, policy_name: str, ask: Callable[[Request], Any] | None
    ) -> None:
        self._kv_cache, self._policy_name, self._ask = kv_cache, policy_name, ask
        self._ranks = None if ask is None else self._make(self._asked)

    @property
    def in_use(self) -> bool:
        """Whether the policy has given ranks, or is asked for them."""
        return self._ranks is not None

    def begin(self) -> Retention:
        """Let ranks decide what is evicted, if they do not yet."""
        if self._ranks is None:
            self._ranks = self._make(None)
        ranks = self._ranks
        self._kv_cache.retention = ranks.replace(self._kv_cache.retention, ranks)
        return ranks

    def retain(self, request: Request, rank: float, num_tokens: int | None) -> int:
        """Give the request's cached prefix, or its first `num_tokens` tokens, a rank; returns the
        tokens that are cached. Raises `PolicyError` for a rank that is no number.
        """
        self._check(rank, request)
        return self.begin().rank(request, rank, num_tokens)

    def _make(self, ask: Callable[[Request], float] | None) -> Retention:
        from aioserve.kv_cache.retention import Retention

        kv_cache, connector = self._kv_cache, self._kv_cache.connector
        outside = None if connector is None else connector.outside
        return Retention(kv_cache.pool, kv_cache.block_size, ask, outside)

    def _asked(self, request: Request) -> float:
        assert self._ask is not None
        rank: float = self._ask(request)
        self._check(rank, request)
        return rank

    def _check(self, rank: object, request: Request) -> None:
        if not isinstance(rank, int | float) or rank != rank:
            raise PolicyError(
                f"policy {self._policy_name}: the retention of a request is a number, got "
                f"{rank!r:.100} for {request.request_id!r}"
            )
