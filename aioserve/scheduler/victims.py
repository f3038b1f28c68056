"""Who gives way when KV blocks run out, under whatever policy: a key per value of `victim`.

The largest key is the victim; ties are broken by the policy's order. Under each of the others
somebody is never the victim, and finishes: the oldest, the most urgent, the one that has computed
most, the one with the least to do. Under `least_lost`, whoever takes the blocks gets a token.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

from aioserve.kv_cache import KVCacheManager
from aioserve.request import Request

order_key = attrgetter("order_key")

VICTIM_KEYS: dict[str, Callable[[Request, KVCacheManager], Any]] = {
    "newest": lambda r, _: (r.arrival_time, r.order_key),
    "lowest_priority": lambda r, _: (r.priority, r.order_key),
    "least_computed": lambda r, _: (-r.num_computed_tokens, r.order_key),
    "most_remaining": lambda r, _: (r.max_total_tokens - r.num_tokens, r.order_key),
    "least_lost": lambda r, kv_cache: (-kv_cache.estimate_lost_tokens(r), r.order_key),
}
