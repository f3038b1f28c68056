"""Which cached prefixes are evicted first: ranks of requests, as a policy states them.

Knows requests and the contents of their blocks. Which block is evicted first, `Ranking` says.
"""

from collections import deque
from collections.abc import Callable

from aioserve.kv_cache.block_pool import BlockPool
from aioserve.kv_cache.hashing import hash_blocks
from aioserve.kv_cache.ranking import Ranking
from aioserve.request import Request


class Retention:
    """The ranks that one policy states for the prefixes in one KV cache."""

    def __init__(
        self, pool: BlockPool, block_size: int, ask: Callable[[Request], float] | None
    ) -> None:
        """`ask` is the policy: the rank of what a request has left in the cache. None: the policy
        states ranks by `rank` alone.
        """
        self._pool = pool
        self._block_size = block_size  # tokens
        self._ask = ask
        self.ranking = Ranking(pool)
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
            if new is not None:
                new.ranking.begin(new.settle)
        return new

    def note_freed(self, request: Request) -> None:
        """The request has given up its blocks, of which some are cached."""
        if self._ask is not None:
            self.freed.append(request)

    def settle(self) -> None:
        """Ask for the ranks of all that was given up. Raises what the policy does; of the request
        for which it did, the blocks keep the rank that they had.
        """
        while self.freed and self._ask is not None:
            request = self.freed.popleft()
            if contents := self._find_contents(request, request.num_tokens):
                self.ranking.rank(contents, self._ask(request))

    def rank(self, request: Request, rank: float, num_tokens: int | None) -> int:
        """Give the cached prefix of the request's first `num_tokens` tokens, None: of all, a rank.
        Returns the tokens that are cached.
        """
        limit = request.num_tokens if num_tokens is None else num_tokens
        contents = self._find_contents(request, limit)
        self.ranking.rank(contents, rank)
        return len(contents) * self._block_size

    def _find_contents(self, request: Request, num_tokens: int) -> list[bytes]:
        num_blocks = max(min(request.num_tokens - 1, num_tokens), 0) // self._block_size
        hash_blocks(request, num_blocks, self._block_size)
        found: list[bytes] = []
        for content in request.block_hashes[:num_blocks]:
            if self._pool.lookup(content) is None:
                break
            found.append(content)
        return found
