"""Which types a side of the runner takes, by rules that both have in common."""

from typing import Literal

import pytest
import torch

from aioserve.config import CacheConfig, EngineConfig, ModelConfig
from aioserve.errors import ConfigError
from aioserve.gpu.cuda.load import CUDA_TYPES
from aioserve.runner.attention.backend import KVCacheSpec, LayerSpec
from aioserve.runner.cpu.kv_memory import CPU_TYPES
from aioserve.runner.load_plan import SideTypes

SPEC = KVCacheSpec((LayerSpec(2, 64, 64), LayerSpec(2, 64, 62)), torch.bfloat16)


@pytest.mark.parametrize(
    ("types", "other", "told"),
    [
        (CPU_TYPES, "fp8", "is fp8, which is for CUDA: give int8, or leave it out"),
        (CUDA_TYPES, "int8", "is int8, which is for the CPU: give fp8, or leave it out"),
    ],
)
def test_a_cache_type_of_the_other_side_is_refused_with_that_of_this_side(
    types: SideTypes, other: Literal["int8", "fp8"], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        types.keep(SPEC, EngineConfig(cache=CacheConfig(kv_cache_dtype=other)))


def test_only_int8_minds_the_size_of_heads() -> None:
    int8 = EngineConfig(cache=CacheConfig(kv_cache_dtype="int8"))
    fp8 = EngineConfig(cache=CacheConfig(kv_cache_dtype="fp8"))
    with pytest.raises(ConfigError, match="the model has heads of 62"):
        CPU_TYPES.keep(SPEC, int8)
    assert CUDA_TYPES.keep(SPEC, fp8) == KVCacheSpec(SPEC.layers, torch.float8_e4m3fn)


@pytest.mark.parametrize(("is_fast", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_auto_is_what_the_side_has_instead_of_a_slow_bfloat16(is_fast: bool, dtype: str) -> None:
    types = SideTypes("fp8", "float16", lambda: is_fast)
    assert types.resolve(ModelConfig(dtype="auto")).dtype == dtype
    assert types.resolve(ModelConfig(dtype="float32")).dtype == "float32"
