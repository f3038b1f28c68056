"""How many KV blocks the CPU's memory gets."""

from typing import Any

import pytest

from aioserve.config import CacheConfig, EngineConfig, SchedulerConfig
from aioserve.errors import ConfigError
from aioserve.features.states.cpu_memory import choose_num_state_slots
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.kv_memory import choose_num_kv_blocks


@pytest.mark.parametrize(("caches_prefixes", "expected"), [(True, 4 * 7 + 7), (False, 4 * 7)])
def test_kv_pool_is_bounded_by_what_the_batch_can_use_and_a_share_for_prefixes(
    caches_prefixes: bool, expected: int
) -> None:
    config = EngineConfig(
        cache=CacheConfig(enable_prefix_caching=caches_prefixes),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )
    assert choose_num_kv_blocks(config, bytes_per_token=16, max_model_len=100) == expected


def test_kv_pool_by_default_takes_a_quarter_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 4 << 30)
    number = choose_num_kv_blocks(EngineConfig(), bytes_per_token=1 << 20, max_model_len=4096)
    assert number == 64


@pytest.mark.parametrize(
    ("weight_bytes", "max_model_len", "num_bytes"),
    [(400 << 20, 4096, 800 << 20), (1 << 20, 4096, 256 << 20), (1 << 20, 40960, 640 << 20)],
)
def test_kv_pool_by_default_is_in_proportion_to_the_weights_and_holds_one_longest_request(
    monkeypatch: pytest.MonkeyPatch, weight_bytes: int, max_model_len: int, num_bytes: int
) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 16 << 30)
    size = 16 << 10  # bytes of a token
    number = choose_num_kv_blocks(
        EngineConfig(), size, max_model_len=max_model_len, weight_bytes=weight_bytes
    )
    assert number * 16 * size == num_bytes


@pytest.mark.parametrize("cache", [{"num_kv_blocks": 5000}, {"kv_cache_gib": 5000 / 1024 / 4}])
def test_kv_pool_that_is_set_is_taken_as_it_is(cache: dict[str, Any]) -> None:
    config = EngineConfig(
        cache=CacheConfig(block_size=16, **cache), scheduler=SchedulerConfig(max_num_seqs=4)
    )
    assert choose_num_kv_blocks(config, bytes_per_token=1 << 14, max_model_len=100) == 5000


def test_kv_pool_that_holds_no_block_is_refused_with_numbers() -> None:
    config = EngineConfig(cache=CacheConfig(kv_cache_gib=0.001))
    with pytest.raises(ConfigError, match=r"16 tokens need 16.0 MiB.* 1.0 MiB"):
        choose_num_kv_blocks(config, bytes_per_token=1 << 20, max_model_len=4096)


def test_more_slots_for_states_than_the_memory_holds_are_refused() -> None:
    config = EngineConfig(cache=CacheConfig(num_state_slots=10**11))
    with pytest.raises(ConfigError, match=r"num_state_slots is 100000000000: .* are free"):
        choose_num_state_slots(config, 1280, is_shared=True)
