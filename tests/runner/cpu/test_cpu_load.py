"""What is chosen at load, refused before it, and told: memory, threads, the type of numbers."""

import os
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig
from aioserve.errors import ConfigError
from aioserve.gpu.tensor_parallel.group import GroupedRanks
from aioserve.kernels import load_kernels, usable_variants
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu import load, machine, models
from aioserve.runner.cpu.kv_memory import CPU_TYPES
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.runner.cpu.machine import ComputeThreads
from aioserve.runner.cpu.models import load_model_on_cpu
from aioserve.runner.ranks import Ranks
from tests.models import make_model
from tests.runner.cpu.resident import resident_bytes
from tests.runner.driver import make_config
from tests.variants import DTYPE

IS_X86 = platform.machine() in ("x86_64", "AMD64")


def test_a_large_pool_takes_no_memory_at_load(model_path: Callable[..., Path]) -> None:
    model = make_config(model_path("llama")).model
    config = EngineConfig(model=model, cache=CacheConfig(kv_cache_gib=1))
    before = resident_bytes()
    runner = load_on_cpu(config, ModelInfo(model))
    assert resident_bytes() - before < 256 << 20
    runner.close()


def test_too_little_memory_is_said_with_numbers_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path, hidden_size=512)
    # 1,024 tokens of 3 layers, K and V, 2 heads of 16: 0.75 MiB
    config = make_config(tmp_path, dtype="float32")
    monkeypatch.setattr(machine, "available_memory", lambda: 5 << 20)
    monkeypatch.setattr(models, "load_model_on_cpu", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError) as caught:
        load_on_cpu(config, ModelInfo(config.model))
    assert "5 MiB for the weights and 1 MiB for the KV pool" in str(caught.value)
    assert "5 MiB are available (cache.kv_cache_gib" in str(caught.value)


def test_host_memory_of_a_connector_counts(
    model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(model_path("llama"))
    cache = msgspec.structs.replace(config.cache, kv_connector="memory", kv_connector_gib=1.0)
    config = msgspec.structs.replace(config, cache=cache)
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 30)
    monkeypatch.setattr(models, "load_model_on_cpu", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"and 1,024 MiB for KV blocks outside of it.*connector_"):
        load_on_cpu(config, ModelInfo(config.model))


class TwoRanks(GroupedRanks):
    """What is known of two ranks before they meet."""

    def __init__(self) -> None:
        Ranks.__init__(self, 0, 2, torch.device("cpu"))


@pytest.mark.parametrize(("kind", "num_pools"), [("llama", 1), ("olmo2", 2)])
def test_what_every_rank_has_whole_counts_for_each(
    kind: str, num_pools: int, model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding, and K and V of all heads if the plan does not share them."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(
        models, "check_memory", lambda _, weights, per_token, *__: seen.append((weights, per_token))
    )
    config = make_config(model_path(kind), dtype="float32")
    info = ModelInfo(config.model)
    for ranks in (None, TwoRanks()):
        models._check_memory(config, info, None, ranks)
    (weights, per_token), (of_two, per_token_of_two) = seen
    assert of_two - weights == info.vocab_size * info.hidden_size * 4
    assert per_token_of_two == per_token * num_pools


@pytest.mark.parametrize(("setting", "is_fixed"), [(2, True), (None, False)])
def test_a_number_of_threads_that_is_set_is_fixed(
    setting: int | None,
    is_fixed: bool,
    model_path: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(machine, "default_num_threads", lambda: 2)
    base = make_config(model_path("llama"))
    config = EngineConfig(model=base.model, cache=base.cache, runner=RunnerConfig(threads=setting))
    runner = load_on_cpu(config, ModelInfo(config.model))
    assert torch.get_num_threads() == runner.num_compute_threads == 2
    assert ("2 threads, fewer while" in caplog.text) is not is_fixed
    watched = [os.readlink(f"/proc/self/fd/{file}") for file in runner._threads._files]
    assert len(set(watched)) == (0 if is_fixed else 2)
    runner.close()
    torch.set_num_threads(1)


def test_a_load_that_fails_watches_no_threads_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ComputeThreads] = []

    class Noted(ComputeThreads):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            assert self._files
            made.append(self)

    monkeypatch.setattr(machine, "default_num_threads", lambda: 2)
    monkeypatch.setattr(load, "ComputeThreads", Noted)
    monkeypatch.setattr(machine, "available_memory", lambda: 0)
    config = EngineConfig(model=make_config(make_model("llama", tmp_path)).model)
    with pytest.raises(ConfigError, match="too little memory"):
        load_on_cpu(config, ModelInfo(config.model))
    assert not made[0]._files
    torch.set_num_threads(1)


def test_load_says_in_one_line_what_it_chose(
    model_path: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = make_config(model_path("llama"))
    runner = load_on_cpu(config, ModelInfo(config.model))
    (record,) = [r for r in caplog.records if r.name == "aioserve.runner.cpu.load"]
    assert f"LlamaForCausalLM, fused: {DTYPE}" in record.message
    assert re.search("attention: (compiled kernels|plain torch)", record.message)
    assert "128 blocks, 1024 tokens" in record.message
    runner.close()
    runner.close()


@pytest.fixture
def choose_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """On a CPU without bfloat16 of its own, with this variant of the kernels, or "off"."""
    monkeypatch.setattr(machine, "has_native_bf16", lambda: False)

    def choose(variant: str) -> None:
        if variant != "off" and variant not in usable_variants():
            pytest.skip(f"{variant} does not run here")
        monkeypatch.setenv("AIOSERVE_KERNELS", variant)
        load_kernels.cache_clear()

    yield choose
    load_kernels.cache_clear()


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        ("off", "float32"),
        ("baseline", "float32" if IS_X86 else "bfloat16"),
        ("avx2", "bfloat16"),
        ("avx512", "bfloat16"),
    ],
)
def test_auto_is_bfloat16_where_our_kernels_make_it_fast(
    variant: str, dtype: str, choose_kernels: Callable[[str], None]
) -> None:
    choose_kernels(variant)
    assert CPU_TYPES.resolve(ModelConfig(dtype="auto")).dtype == dtype
    assert CPU_TYPES.resolve(ModelConfig(dtype="float16")).dtype == "float16"


def test_auto_is_bfloat16_where_the_cpu_has_it(
    choose_kernels: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_kernels("off")
    monkeypatch.setattr(machine, "has_native_bf16", lambda: True)
    assert CPU_TYPES.resolve(ModelConfig(dtype="auto")).dtype == "bfloat16"


@pytest.mark.parametrize(("kind", "dtype"), [("llama", torch.bfloat16), ("phi", torch.float32)])
def test_auto_is_float32_for_a_model_that_our_kernels_do_not_serve(
    kind: str, dtype: torch.dtype, choose_kernels: Callable[[str], None], tmp_path: Path
) -> None:
    choose_kernels("avx2")
    make_model(kind, tmp_path)
    for asked, expected in (("auto", dtype), ("bfloat16", torch.bfloat16)):
        config = make_config(tmp_path, dtype=asked).model
        model = load_model_on_cpu(config, ModelInfo(config))
        assert model.kv_cache_spec.dtype == expected
