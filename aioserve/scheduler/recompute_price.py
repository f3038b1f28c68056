"""What it costs to preempt running requests: tokens that they would compute again.

A part for policies that displace: a preempted request finds its blocks again only if no other
request has taken them meanwhile. Does not know what there is to be gained.
"""

from bisect import bisect_left
from collections.abc import Iterable

from aioserve.kv_cache import KVCacheManager
from aioserve.request import Request


class RecomputePrice:
    """Prices of one moment, on the assumption that all that wait come in before the preempted
    request does, and that those that run grow to twice their length.

    Blocks that other requests hold as well cost nothing, and no block costs anything if there is
    room for all of that beside it.
    """

    def __init__(
        self, kv_cache: KVCacheManager, running: Iterable[Request], num_waiting_tokens: int
    ) -> None:
        self._block_size = kv_cache.block_size
        self._ref_counts = kv_cache.pool.ref_counts
        num_wanted = num_waiting_tokens + sum(request.num_tokens for request in running)
        #: Tokens for which there will be no room, if no request is preempted.
        self.num_lacking = num_wanted - kv_cache.pool.num_free_blocks * kv_cache.block_size

    def num_tokens(self, request: Request) -> int:
        """How many of its computed tokens the running request would compute again."""
        num_computed = request.num_computed_tokens
        if num_computed + self.num_lacking <= 0:
            return 0
        counts = self._ref_counts  # what requests share are beginnings
        num_shared = bisect_left(request.block_ids, True, key=lambda b: counts[b] == 1)
        num_own = max(num_computed - num_shared * self._block_size, 0)
        return min(num_own, max(num_own + self.num_lacking, 0))
