"""Which running request is preempted when KV blocks run out: the rules of the setting `victim`."""

from collections.abc import Callable
from typing import Any

from aioserve.kv_cache import KVCacheManager
from aioserve.request import Request

#: By a value of the setting `victim`, the key whose largest value gives way when KV blocks run out,
#: ties broken by the policy's order. Under each but the last one some request is never the victim,
#: and finishes; under `least_lost` the request that takes the blocks gets a token.
VICTIM_KEYS: dict[str, Callable[[Request, KVCacheManager], Any]] = {
    "newest": lambda r, _: (r.arrival_time, r.order_key),
    "lowest_priority": lambda r, _: (r.priority, r.order_key),
    "least_computed": lambda r, _: (-r.num_computed_tokens, r.order_key),
    "most_remaining": lambda r, _: (r.max_total_tokens - r.num_tokens, r.order_key),
    "least_lost": lambda r, kv_cache: (-kv_cache.estimate_lost_tokens(r), r.order_key),
}
