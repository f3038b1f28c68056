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
    for resource in kv_cache.resources:
        resource.check_alone(request)


def check_encoder_inputs(
    request: Request, config: SchedulerConfig, max_whole: int, *, whole: bool
) -> None:
    """Each input must be in the prompt, and fit a step and the cache; all together, if prompts run
    `whole`. One that runs whole itself must fit the `max_whole` tokens that a full house leaves of
    a step: else it would wait as long as others come. Raises `RequestError`.
    """
    room, num_tokens = min(config.max_encoder_tokens, config.encoder_cache_tokens), 0
    for i, item in enumerate(request.encoder_inputs):
        num_tokens = item.num_tokens + (num_tokens if whole else 0)
        if item.end > request.num_prompt_tokens:
            raise RequestError(
                f"encoder_inputs[{i}] ends at {item.end}, but the prompt has "
                f"{request.num_prompt_tokens} tokens",
                param=f"encoder_inputs[{i}]",
            )
        if item.whole and item.num_tokens > max_whole:
            raise RequestError(
                f"encoder_inputs[{i}] does not fit: its {item.num_tokens} tokens have to run in "
                "one step, and max_num_batched_tokens, less a decode with drafts of each of "
                f"max_num_seqs, or long_prefill_token_threshold is {max(max_whole, 0)}",
                param=f"encoder_inputs[{i}]",
            )
        if num_tokens > room:
            what = "it has, with those before it," if whole and i else "it has"
            raise RequestError(
                f"encoder_inputs[{i}] does not fit: {what} {num_tokens} tokens, and the smaller of "
                f"max_encoder_tokens and encoder_cache_tokens is {room}",
                param=f"encoder_inputs[{i}]",
            )


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
