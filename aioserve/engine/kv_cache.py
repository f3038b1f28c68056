"""The KV cache of an engine: made from settings and from what its runner has room for.

The engine, the simulator and what-if on a decision log make theirs here. Knows no request.
"""

from typing import TYPE_CHECKING

from aioserve.config import CacheConfig, ModelConfig
from aioserve.errors import ConfigError
from aioserve.kv_cache import KVCacheManager, make_resources
from aioserve.runner.interface import RunnerInfo

if TYPE_CHECKING:
    from aioserve.kv_cache import KVConnectorBase


def make_kv_cache(
    cache: CacheConfig,
    info: RunnerInfo,
    *,
    record_events: bool = False,
    connector: "KVConnectorBase | None" = None,
) -> KVCacheManager:
    """Return the manager of the blocks, state slots and window blocks that a runner has told of."""
    return KVCacheManager(
        info.num_kv_blocks,
        cache.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        watermark=cache.watermark,
        record_events=record_events,
        connector=connector,
        resources=make_resources(
            info.num_state_slots,
            info.windows,
            cache.block_size,
            keeps_prefixes=cache.enable_prefix_caching,
        ),
        max_draft_tokens=info.max_draft_tokens,
    )


def fit_max_model_len(model: ModelConfig, max_model_len: int, num_slots: int) -> int:
    """Return the most tokens of a request, so that every request that is accepted can run alone in
    a cache of `num_slots` tokens. `max_model_len` is what the model and the settings allow. Raises
    `ConfigError` if the settings ask for more than the cache holds.
    """
    if max_model_len - 1 <= num_slots:  # the last token is never computed
        return max_model_len
    if model.max_model_len is not None:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but the KV cache holds {num_slots} tokens: "
            "lower max_model_len or raise kv_cache_gib (or num_kv_blocks)"
        )
    return num_slots
