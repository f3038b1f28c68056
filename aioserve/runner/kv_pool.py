"""How many KV blocks requests can use, wherever they lie. Knows settings, no memory."""

from aioserve.config import EngineConfig

PREFIX_SHARE = 0.25  # of what all requests can use: room for prefixes of those that have left


def max_useful_blocks(config: EngineConfig, max_model_len: int) -> int:
    """What `max_num_seqs` requests of `max_model_len` tokens use, and `PREFIX_SHARE` of it more."""
    num_blocks = config.scheduler.max_num_seqs * -(-max_model_len // config.cache.block_size)
    if config.cache.enable_prefix_caching:
        num_blocks += int(num_blocks * PREFIX_SHARE)
    return num_blocks
