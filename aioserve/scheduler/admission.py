"""What is refused at the scheduler's door: requests that could never run, and a queue that is full.

Knows sizes and limits. Knows nothing about order or steps.
"""

from aioserve.config import SchedulerConfig
from aioserve.errors import EngineOverloadedError, RequestError
from aioserve.kv_cache import KVCacheManager
from aioserve.request import Request
from aioserve.scheduler.queue import RequestQueue


def check_size(request: Request, kv_cache: KVCacheManager) -> None:
    """Every request must be able to run alone, up to its bound. Raises `RequestError`."""
    # The last token is never computed, so a request needs one slot less than its length.
    most = request.max_total_tokens - 1
    param = "max_tokens" if request.pooling_params is None else "prompt"
    if most > kv_cache.num_slots:
        raise RequestError(
            f"prompt and output of up to {request.max_total_tokens} tokens do not fit the KV "
            f"cache of {kv_cache.num_slots} tokens",
            param=param,
        )
    kv_cache.accept(request)


def check_queue(
    num_tokens: int,
    waiting: RequestQueue,
    config: SchedulerConfig,
    num_arriving: int = 0,
    arriving_tokens: int = 0,
) -> None:
    """Raises `EngineOverloadedError` if too many requests or prompt tokens wait already for one
    more of `num_tokens`; those that are arriving, but not in the queue yet, wait as well.
    """
    num_waiting = len(waiting) + num_arriving
    if num_waiting >= config.max_waiting_requests:
        raise EngineOverloadedError(
            f"{num_waiting} requests are waiting already (max_waiting_requests)"
        )
    limit = config.max_waiting_tokens
    waiting_tokens = waiting.num_tokens + arriving_tokens
    if limit is not None and num_waiting and waiting_tokens + num_tokens > limit:
        raise EngineOverloadedError(
            f"{waiting_tokens} prompt tokens are waiting already; {num_tokens} "
            f"more would be over max_waiting_tokens ({limit})"
        )
