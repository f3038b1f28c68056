"""How memory is shared between layers with a window and the others."""

import pytest
import torch

from aioserve.config import CacheConfig, EngineConfig, SchedulerConfig
from aioserve.features.states.cpu_memory import make_window_spec
from aioserve.kv_cache import WindowSpec
from aioserve.runner.attention.backend import KVCacheSpec, LayerSpec
from aioserve.runner.cpu.kv_memory import GIB, choose_num_kv_blocks
from aioserve.runner.interface import TYPICAL_TOKENS

#: As gpt-oss has them: 24 layers, of which every other one sees 128 tokens.
SPEC = KVCacheSpec((LayerSpec(8, 64, 64),) * 24, torch.bfloat16)
WINDOWS = dict.fromkeys(range(0, 24, 2), 128)
OTHERS = SPEC.bytes_per_token // 2
MAX_MODEL_LEN = 8192


def make_config(gib: float | None, num_seqs: int, *, step: int = 512, **cache: int) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(kv_cache_gib=gib, **cache),
        scheduler=SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=step),
    )


def share(config: EngineConfig) -> tuple[WindowSpec, int, int]:
    """The windows, their bytes, and the blocks of the others."""
    spec = make_window_spec(config, SPEC, WINDOWS, MAX_MODEL_LEN, OTHERS)
    assert spec is not None
    num_bytes = spec.num_blocks * 16 * SPEC.part(WINDOWS).bytes_per_token
    return spec, num_bytes, choose_num_kv_blocks(config, OTHERS, MAX_MODEL_LEN, num_bytes)


@pytest.mark.parametrize("gib", [0.5, 1.0, 3.0])
def test_both_pools_last_for_as_many_typical_requests(gib: float) -> None:
    spec, num_bytes, num_blocks = share(make_config(gib, 1000))
    total = num_bytes + num_blocks * 16 * OTHERS
    assert gib * GIB - 16 * OTHERS < total <= gib * GIB
    num_seqs = num_blocks * 16 / TYPICAL_TOKENS
    in_windows = spec.num_blocks / spec.num_decode_blocks(16)
    assert num_seqs <= in_windows < 1.3 * num_seqs + 32  # prefixes, and two prompts


def test_windows_get_no_more_than_requests_can_use() -> None:
    few, many = share(make_config(8.0, 4)), share(make_config(16.0, 4))
    assert few[0] == many[0]
    assert many[2] > few[2]


def test_what_is_set_is_what_they_get() -> None:
    spec, num_bytes, _ = share(make_config(1.0, 100, num_window_blocks=77))
    assert (spec.num_blocks, num_bytes) == (77, 77 * 16 * OTHERS)
    spec, _, num_blocks = share(make_config(None, 1000, num_kv_blocks=600))
    assert (spec.num_blocks, num_blocks) == (600, 600)


def test_one_request_always_fits_or_there_is_one_pool() -> None:
    config = make_config(0.25, 8, step=8192)  # 8,192 tokens of either kind take 0.4 GiB
    assert make_window_spec(config, SPEC, WINDOWS, MAX_MODEL_LEN, OTHERS) is None
    spec, _, num_blocks = share(make_config(0.25, 8))
    assert num_blocks * 16 >= MAX_MODEL_LEN
    assert spec.num_blocks >= spec.num_request_blocks(MAX_MODEL_LEN, MAX_MODEL_LEN, 16)
