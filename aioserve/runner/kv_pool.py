"""How many KV blocks to allocate. Knows settings and sizes; allocates nothing."""

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.runner import machine

DEFAULT_MEMORY_SHARE = 0.25  # of what is free once the weights are loaded
DEFAULT_MEMORY_LIMIT = 4 << 30  # bytes
MIB = 1 << 20


def choose_num_kv_blocks(config: EngineConfig, bytes_per_token: int, max_model_len: int) -> int:
    """Blocks of the KV pool: the setting, else what fits into the memory meant for it.

    Never more than `max_num_seqs` requests of `max_model_len` tokens can use, unless set. Raises
    `ConfigError` if not even one block fits.
    """
    cache = config.cache
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    if cache.kv_cache_gib is not None:
        budget = int(cache.kv_cache_gib * (1 << 30))
    else:
        budget = min(int(machine.available_memory() * DEFAULT_MEMORY_SHARE), DEFAULT_MEMORY_LIMIT)
    bytes_per_block = bytes_per_token * cache.block_size
    num_blocks = budget // bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"not one KV block fits: {cache.block_size} tokens need {bytes_per_block / MIB:.1f} "
            f"MiB, the pool has {budget / MIB:.1f} MiB (cache.kv_cache_gib, cache.block_size)"
        )
    return min(num_blocks, config.scheduler.max_num_seqs * -(-max_model_len // cache.block_size))
