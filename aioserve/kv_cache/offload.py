"""What it costs to keep a request's KV blocks in host memory: the question, put to the connector.

Knows which tokens of a request are computed, and whole blocks of them.
"""

from aioserve.kv_cache.connector import OffloadPrice
from aioserve.kv_cache.hashing import hash_blocks
from aioserve.kv_cache.manager import KVCacheManager
from aioserve.request import Request


def offload_price(kv_cache: KVCacheManager, request: Request, num_computed: int) -> OffloadPrice:
    """The price of offloading a request of which steps before this one compute `num_computed`
    tokens; 0 tokens of a request that holds no blocks.
    """
    connector = kv_cache.connector
    is_possible = kv_cache.enable_prefix_caching and request.takes_cached_prefix
    num_computed = num_computed if request.block_ids else 0
    if connector is None or not is_possible:
        return OffloadPrice(0, 0.0, 0.0, 0.0)
    # One token is left to compute and sample from.
    num_blocks = min(num_computed, request.num_tokens - 1) // kv_cache.block_size
    hash_blocks(request, num_blocks, kv_cache.block_size)
    return connector.get_offload_price(request, num_blocks)
