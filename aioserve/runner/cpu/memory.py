"""How this machine's memory is shared out: how many KV blocks to allocate, and whether they fit.

And in which types a model computes here. Knows settings and sizes, no tensors.
"""

from typing import Any

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.runner.cpu import machine
from aioserve.runner.info import max_useful_blocks
from aioserve.runner.load_plan import SideTypes

DEFAULT_MEMORY_SHARE = 0.25  # of what is free once the weights are loaded
DEFAULT_MEMORY_LIMIT = 4 << 30  # bytes
_WITHOUT_KV = {"linear_attention", "conv", "mlp", "moe"}  # types of layers
MIB, GIB = 1 << 20, 1 << 30


def check_memory(
    config: EngineConfig,
    weight_bytes: int,
    bytes_per_token: int | None,
    max_model_len: int,
    encoder_cache_bytes: int = 0,
) -> None:
    """Raise `ConfigError` if weights, and what the settings ask for besides, do not fit together.

    For use before anything is loaded: a system without memory ends the process without a word.
    """
    pool_bytes = 0
    sized = config.cache.num_kv_blocks is not None or config.cache.kv_cache_gib is not None
    if sized and bytes_per_token is not None:
        num_blocks = choose_num_kv_blocks(config, bytes_per_token, max_model_len)
        pool_bytes = num_blocks * config.cache.block_size * bytes_per_token
    outside = 0 if config.cache.kv_connector == "none" else int(config.cache.kv_connector_gib * GIB)
    available = machine.available_memory()
    if weight_bytes + pool_bytes + outside + encoder_cache_bytes > available:
        others = (
            ("the KV pool", pool_bytes),
            ("KV blocks outside of it", outside),
            ("the encoder cache", encoder_cache_bytes),
        )
        more = "".join(f" and {size / MIB:,.0f} MiB for {what}" for what, size in others if size)
        settings = "cache.kv_cache_gib, cache.num_kv_blocks, model.dtype"
        raise ConfigError(
            f"too little memory: {weight_bytes / MIB:,.0f} MiB for the weights{more} are needed, "
            f"{available / MIB:,.0f} MiB are available ({settings}"
            f"{', cache.kv_connector_gib' if outside else ''}"
            f"{', scheduler.encoder_cache_tokens' if encoder_cache_bytes else ''})"
        )


def expected_bytes_per_token(hf_config: Any, itemsize: int, scale_bytes: int = 0) -> int | None:
    """K and V of all layers as a configuration states them, if it uses the common fields; each head
    has a scale besides.
    """
    layers = [hf_config] * (getattr(hf_config, "num_hidden_layers", None) or 0)
    if getattr(hf_config, "is_heterogeneous", False):
        layers = list(hf_config.per_layer_config)  # some fields cannot be read from the whole
    shares = getattr(hf_config, "kv_sharing_modes", None) or [None] * len(layers)
    types = getattr(hf_config, "layer_types", None) or [None] * len(layers)
    if not len(layers) == len(shares) == len(types):
        return None
    sizes = [
        _bytes_of_layer(layer, itemsize, scale_bytes)
        for layer, share, kind in zip(layers, shares, types, strict=True)
        if share != "reuse" and kind not in _WITHOUT_KV
    ]
    known = [size for size in sizes if size is not None]
    return sum(known) if layers and len(known) == len(sizes) else None


def _bytes_of_layer(config: Any, itemsize: int, scale_bytes: int) -> int | None:
    num_heads, num_kv_heads, head_dim, hidden_size = (
        getattr(config, name, None)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    )
    if not (num_heads and (head_dim or hidden_size)):
        return None
    row_bytes = (head_dim or hidden_size // num_heads) * itemsize + scale_bytes
    return int(2 * (num_kv_heads or num_heads) * row_bytes)


def choose_num_kv_blocks(
    config: EngineConfig,
    bytes_per_token: int,
    max_model_len: int,
    num_other_bytes: int = 0,
    weight_bytes: int = 0,
) -> int:
    """Return blocks of the KV pool: the setting, else what fits into the memory meant for it, of
    which states and windows take a part.

    Unless set, never more than `max_useful_blocks`, nor than twice `weight_bytes`, 256 MiB and
    `max_model_len` tokens, whichever is most. Raises `ConfigError` if not even one block fits.
    """
    cache = config.cache
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks
    if not bytes_per_token:  # no layer of it keeps any: they only count tokens
        return max_useful_blocks(config, max_model_len)
    budget = max(memory_for_requests(config) - num_other_bytes, 0)
    bytes_per_block = bytes_per_token * cache.block_size
    num_blocks = budget // bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"not one KV block fits: {cache.block_size} tokens need {bytes_per_block / MIB:.1f} "
            f"MiB, the pool has {budget / MIB:.1f} MiB (cache.kv_cache_gib, cache.block_size)"
        )
    if cache.kv_cache_gib is not None:
        return num_blocks
    most = -(-max(2 * weight_bytes, 256 * MIB, max_model_len * bytes_per_token) // bytes_per_block)
    return min(num_blocks, max_useful_blocks(config, max_model_len), most)


def memory_for_requests(config: EngineConfig) -> int:
    """Return bytes for what is kept of requests."""
    if config.cache.kv_cache_gib is not None:
        return int(config.cache.kv_cache_gib * GIB)
    return min(int(machine.available_memory() * DEFAULT_MEMORY_SHARE), DEFAULT_MEMORY_LIMIT)


# The types in which a model computes on this CPU, and in which its K and V are kept.


def _is_bfloat16_fast() -> bool:
    """Return whether a model that our kernels serve computes fast in bfloat16."""
    try:
        return machine.has_native_bf16() or load_kernels().is_fast
    except KernelsUnavailableError:
        return False


CPU_TYPES = SideTypes("int8", "float32", _is_bfloat16_fast)
