"""The types in which a model computes on this CPU, and in which its K and V are kept.

Knows settings and what the machine is quick at; loads nothing.
"""

import msgspec
import torch

from aioserve.config import EngineConfig, ModelConfig
from aioserve.errors import ConfigError
from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.runner.attention.backend import SCALE_BYTES, KVCacheSpec
from aioserve.runner.cpu import machine


def with_dtype(config: ModelConfig) -> ModelConfig:
    """The model's settings with "auto" resolved, rightly if our kernels serve the model."""
    if config.dtype != "auto":
        return config
    try:
        is_fast = machine.has_native_bf16() or load_kernels().is_fast
    except KernelsUnavailableError:
        is_fast = False
    return msgspec.structs.replace(config, dtype="bfloat16" if is_fast else "float32")


def with_kv_dtype(spec: KVCacheSpec, config: EngineConfig) -> KVCacheSpec:
    """The type in which K and V are kept. Raises `ConfigError` if the model has none such."""
    wanted = config.cache.kv_cache_dtype
    if wanted == "auto":
        return spec
    if wanted != "int8":
        raise ConfigError(
            f"cache.kv_cache_dtype is {wanted}, which is for CUDA: give int8, or leave it out"
        )
    for layer in spec.layers:
        for dim in (layer.key_head_dim, layer.value_head_dim):
            if dim % SCALE_BYTES:
                raise ConfigError(
                    "cache.kv_cache_dtype is int8, which needs heads of a multiple of "
                    f"{SCALE_BYTES}, but the model has heads of {dim}: leave it out"
                )
    return KVCacheSpec(spec.layers, torch.int8)
