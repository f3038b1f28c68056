"""How a card's memory is shared out, and what is refused with the numbers."""

from typing import Any

import pytest

from aioserve.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import ConfigError
from aioserve.gpu.cuda.device import CardMemory
from aioserve.gpu.cuda.load import GIB, MemoryPlan, check_weights_fit, plan_memory

CARD = CardMemory("a card", total=24 * GIB, free=23 * GIB)
PAGE_BYTES = 2 << 20


def make_config(**settings: Any) -> EngineConfig:
    cache = {
        name: settings.pop(name) for name in ("num_kv_blocks", "kv_cache_gib") if name in settings
    }
    return EngineConfig(
        cache=CacheConfig(**cache),
        runner=RunnerConfig(**settings),
        scheduler=SchedulerConfig(max_num_seqs=64),
    )


def plan(
    config: EngineConfig, weights: int = 15 * GIB, graphs: int = GIB, images: int = 0
) -> MemoryPlan:
    return plan_memory(
        CARD,
        config,
        weights=weights,
        activations=GIB,
        graphs=graphs,
        page_bytes=PAGE_BYTES,
        max_model_len=8192,
        images=images,
    )


def test_everything_together_stays_within_the_share_of_the_card() -> None:
    found = plan(make_config(gpu_memory_utilization=0.9))
    used_by_others = CARD.total - CARD.free
    pool = (found.num_pages + 1) * PAGE_BYTES  # and the dummy page
    total = used_by_others + found.weights + found.activations + found.graphs + pool
    assert 0.9 * CARD.total - PAGE_BYTES <= total <= 0.9 * CARD.total


def test_a_larger_share_and_no_graphs_leave_more_for_the_pool() -> None:
    base = plan(make_config()).num_pages
    assert plan(make_config(gpu_memory_utilization=0.95)).num_pages > base
    assert plan(make_config(), graphs=0).num_pages - base == GIB // PAGE_BYTES


def test_outputs_of_an_image_encoder_are_taken_from_the_pool() -> None:
    base, found = plan(make_config()), plan(make_config(), images=GIB)
    assert base.num_pages - found.num_pages == GIB // PAGE_BYTES
    assert found.total == base.total
    assert "encoded images 1.00" in found.describe(16, 8192)


def test_the_pool_is_never_larger_than_all_requests_can_use() -> None:
    assert plan(make_config(), weights=GIB).num_pages < 64 * 8192 // 16
    sizes = {"weights": GIB, "activations": GIB, "graphs": 0, "page_bytes": PAGE_BYTES}
    short = plan_memory(CARD, make_config(), max_model_len=100, **sizes)
    assert short.num_pages == 64 * 7 * 5 // 4  # a quarter for cached prefixes


@pytest.mark.parametrize("settings", [{"num_kv_blocks": 500}, {"kv_cache_gib": 1000 / 1024}])
def test_a_pool_that_is_set_is_taken_as_it_is(settings: dict[str, Any]) -> None:
    assert plan(make_config(**settings)).num_pages == 500


@pytest.mark.parametrize("settings", [{"num_kv_blocks": 100_000}, {"kv_cache_gib": 20}])
def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(settings: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"weights take 15\.00, activations 1\.00 .*raise gpu_mem"
    ):
        plan(make_config(**settings))


def test_activations_that_leave_no_room_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs 1 blocks of 2097152 bytes, 0 fit"):
        plan(make_config(), weights=19 * GIB)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded() -> None:
    check_weights_fit(CARD, make_config(), 20 * GIB)
    with pytest.raises(ConfigError, match=r"weights need 30\.00 GiB; a card has 23\.00 of 24\.00"):
        check_weights_fit(CARD, make_config(), 30 * GIB)


def test_the_line_that_is_said_at_start_has_every_number() -> None:
    line = plan(make_config()).describe(page_size=16, max_model_len=8192)
    assert line == (
        "device memory: 20.60 GiB to use; weights 15.00, activations 1.00, CUDA graphs 1.00, "
        "KV pool 3.60: 29472 tokens, 3.6 requests of 8192"
    )


def test_pages_of_windows_leave_less_for_the_others() -> None:
    sizes = {"weights": 15 * GIB, "activations": GIB, "graphs": GIB, "page_bytes": PAGE_BYTES}
    base = plan_memory(CARD, make_config(), max_model_len=8192, **sizes)
    beside = plan_memory(CARD, make_config(), max_model_len=8192, windows=GIB, **sizes)
    assert base.num_pages - beside.num_pages == GIB // PAGE_BYTES
    assert beside.total - beside.num_pages * PAGE_BYTES == (
        base.total - base.num_pages * PAGE_BYTES + GIB
    )
    assert "CUDA graphs 1.00, window blocks 1.00, KV pool" in beside.describe(16, 8192)
    both = make_config(kv_cache_gib=2)
    assert plan_memory(CARD, both, max_model_len=8192, windows=GIB, **sizes).num_pages == 512
    with pytest.raises(ConfigError, match=r"0 fit: .* graphs 1.00, window blocks 2.00 .*num_windo"):
        plan_memory(CARD, both, max_model_len=8192, windows=2 * GIB, **sizes)


def test_blocks_that_hold_nothing_are_as_many_as_requests_can_use() -> None:
    """All layers have pages of their own for windows."""
    sizes = {"weights": 15 * GIB, "activations": GIB, "graphs": GIB, "page_bytes": 0}
    found = plan_memory(CARD, make_config(), max_model_len=100, windows=GIB, **sizes)
    assert found.num_pages == 64 * 7 * 5 // 4
    assert found.describe(16, 100).endswith("no other KV pool: all layers have a sliding window")
    config = make_config(num_kv_blocks=10_000)
    found = plan_memory(CARD, config, max_model_len=100, windows=GIB, **sizes)
    assert found.num_pages == 10_000
    with pytest.raises(ConfigError, match=r"windows needs 5\.00 GiB of KV blocks, 0 fit"):
        plan_memory(CARD, make_config(), max_model_len=100, windows=5 * GIB, **sizes)
