"""What a policy can read of the KV cache's memory, in tokens and exact: shared blocks count once.

Reads blocks and leases and changes nothing.
"""

from itertools import islice
from typing import Any, NamedTuple

from aioserve.request import Request
from aioserve.scheduler.succession import Switchable


class HeldPrefix(NamedTuple):
    """A lease: the prefix of a conversation that `pin` keeps."""

    user: str  # the client's name
    conversation: str  # the hint `session` of its requests, else the id of the request
    num_tokens: int  # of its blocks, those that other leases or requests hold, too, included
    until: float  # seconds of the clock


class Memory:
    """KV tokens of one cache. `total` is `free` and `held` and `leased` together."""

    def __init__(self, scheduler: Switchable) -> None:
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
        """Of the free tokens, those that are cached prefixes."""
        pool = self._kv_cache.pool
        return self._tokens(pool.num_free_blocks - pool.num_unused_blocks)

    @property
    def leased(self) -> int:
        """Tokens that leases hold (`pin`), and no request does. Costs time with each lease."""
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
        """The leases (`pin`), or `most` of them, each with its user, conversation, tokens and end;
        the newest first.
        """
        held: dict[Any, Any] = self._kv_cache.leases.held  # by `Request.conversation`
        found = []
        for key in islice(reversed(held), most):
            _, user, name = key
            conversation = name[0] if isinstance(name, tuple) else str(name)
            num_tokens = self._tokens(len(held[key].block_ids))
            found.append(HeldPrefix(user, conversation, num_tokens, held[key].until))
        return found

    def cached(self, request: Request) -> int:
        """Tokens of the request's longest cached prefix. Costs time with its length;
        `kv_cache.estimate_cached_tokens` is cheaper and nearly as good.
        """
        return self._tokens(len(self._kv_cache.get_computed_blocks(request)))

    def own(self, request: Request) -> int:
        """Tokens of the blocks that would become free if the running or paused request were
        preempted.
        """
        counts = self._kv_cache.pool.ref_counts
        return self._tokens(sum(counts[block_id] == 1 for block_id in request.block_ids))
