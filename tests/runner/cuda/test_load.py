"""What is built, chosen and told when a model goes to a device."""

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aioserve.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import ConfigError
from aioserve.gpu.cuda import load as loading
from aioserve.gpu.cuda.executor import StepExecutor, capture_sizes
from aioserve.gpu.cuda.flashinfer_attention import why_not
from aioserve.gpu.cuda.fused import CudaPlace
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.attention.backend import (
    AttentionCall,
    AttentionOptions,
    KVCacheSpec,
    LayerSpec,
)
from aioserve.runner.cpu.models import load_model_on_cpu
from aioserve.runner.loader import load_model
from aioserve.scheduler.output import SchedulerOutput
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.fake_flashinfer import FakeFlashInfer
from tests.runner.driver import Driver, make_config


def settings(path: Path, **runner: Any) -> EngineConfig:
    cache = {"kv_cache_dtype": runner.pop("kv_cache_dtype", "auto")}
    return EngineConfig(
        model=make_config(path, max_model_len=200, fused=False).model,
        cache=CacheConfig(block_size=8, num_kv_blocks=128, **cache),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        runner=RunnerConfig(**runner),
    )


@torch.inference_mode()
def build(config: EngineConfig, device: FakeDevice) -> StepExecutor:
    info = ModelInfo(config.model)
    model = load_model_on_cpu(config.model, info)
    return loading.make_executor(config, info, model, device, device.card())


def generate(executor: StepExecutor, prompt: list[int], num_tokens: int) -> list[int]:
    class Runner:
        @torch.inference_mode()
        def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
            launched = executor.launch(step)
            assert launched is not None
            return executor.finish(launched)

    # Blocks of windows, if there are some, are numbered as the driver numbers the others.
    windows = executor.info.windows
    num_blocks = 128 if windows is None else windows.num_blocks
    driver = Driver(Runner(), num_blocks, 8)  # type: ignore[arg-type]
    driver.add("a", prompt)
    driver.step({"a": 20})
    return driver.generate("a", num_tokens)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_what_is_built_serves_and_the_numbers_are_told(
    kv_cache_dtype: str,
    model_path: Callable[..., Path],
    generate_reference: Callable[..., list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    config = settings(model_path("llama"), kv_cache_dtype=kv_cache_dtype)
    executor = build(config, FakeDevice())
    assert executor.info.num_kv_blocks == 128
    prompt = list(range(30, 70))
    tokens, expected = generate(executor, prompt, 8), generate_reference("llama", prompt, 8)
    if kv_cache_dtype == "auto":
        assert tokens == expected
    else:  # four bits of K and V are enough for the first token of this model, not for all
        assert tokens[0] == expected[0]
    bytes_per_token = 3 * 2 * 2 * 16 * (4 if kv_cache_dtype == "auto" else 1)
    assert (
        f"KV pool {1024 * bytes_per_token / (1 << 30):.2f}: 1024 tokens, 5.1 requests of 200"
        in (caplog.text)
    )
    assert "on a fake device: float32" in caplog.text


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_buffers_of_a_connector_count_in_what_is_planned(
    kv_cache_dtype: str, model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, planned = loading.plan_memory, list[dict[str, Any]]()

    def note(*arguments: Any, **sizes: Any) -> Any:
        planned.append(sizes)
        return plan(*arguments, **sizes)

    monkeypatch.setattr(loading, "plan_memory", note)
    config = settings(model_path("llama"), kv_cache_dtype=kv_cache_dtype)
    for kind in ("none", "memory"):
        cache = msgspec.structs.replace(config.cache, kv_connector=kind)
        executor = build(msgspec.structs.replace(config, cache=cache), FakeDevice())
    blocks = executor.make_host_blocks(1 << 20)
    assert blocks.block_bytes == planned[1]["page_bytes"]
    staged = sum(stage.memory.numel() for stage in blocks._stages)
    assert planned[1]["activations"] - planned[0]["activations"] == staged


@pytest.mark.parametrize("kind", ["llama4_text", "gemma4_text"])
def test_chunks_positions_and_layers_that_share_reach_a_device(
    kind: str, model_path: Callable[..., Path], generate_reference: Callable[..., list[int]]
) -> None:
    executor = build(settings(model_path(kind)), FakeDevice())
    prompt = list(range(30, 90))
    assert generate(executor, prompt, 8) == generate_reference(kind, prompt, 8)


def test_attention_of_its_own_is_refused_on_a_device(model_path: Callable[..., Path]) -> None:
    config = settings(model_path("bloom")).model
    with pytest.raises(ConfigError, match=r"BloomForCausalLM: .* on a CPU, in one process"):
        load_model(config, ModelInfo(config), CudaPlace(torch.device("cpu"), has_triton=False))


def test_a_cache_of_the_cpu_is_refused(model_path: Callable[..., Path]) -> None:
    """By the loader as well: it does not go to fp8 instead."""
    with pytest.raises(ConfigError, match="kv_cache_dtype is int8, which is for the CPU"):
        build(settings(model_path("llama"), kv_cache_dtype="int8"), FakeDevice())


def test_attention_falls_back_and_says_why(
    model_path: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    build(settings(model_path("llama")), FakeDevice())
    assert "plain torch, without CUDA graphs" in caplog.text
    assert "flashinfer does not serve float32 queries" in caplog.text


def test_a_missing_flashinfer_names_the_line_that_installs_it(
    model_path: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "why_not", lambda *_: None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    build(settings(model_path("llama")), FakeDevice())
    assert "pip install flashinfer-python accelerate" in caplog.text


@pytest.mark.parametrize("kernels", ["BatchDecode", "BatchPrefill"])
def test_without_a_compiler_for_flashinfers_kernels_attention_falls_back_and_says_why(
    kernels: str,
    model_path: Callable[..., Path],
    generate_reference: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As on a machine with a driver and no toolkit, where the first plan raises."""

    class NoCompiler:
        def plan(self, **settings: Any) -> None:
            raise RuntimeError("Could not find nvcc and default cuda_home does not exist\nmore")

    monkeypatch.setattr(loading, "why_not", lambda *_: None)
    device = FakeDevice()
    module = FakeFlashInfer(device, None).module()
    setattr(module, f"{kernels}WithPagedKVCacheWrapper", lambda *args, **kwargs: NoCompiler())
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    executor = build(settings(model_path("llama")), device)
    assert (
        "flashinfer 0.7.2 has no kernels for this model and cannot compile them (RuntimeError: "
        "Could not find nvcc and default cuda_home does not exist): install the CUDA toolkit"
    ) in caplog.text
    prompt = list(range(30, 70))
    assert generate(executor, prompt, 6) == generate_reference("llama", prompt, 6)


def test_with_flashinfer_decodes_are_captured_unless_that_is_switched_off(
    model_path: Callable[..., Path],
    generate_reference: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(loading, "why_not", lambda *_: None)
    caplog.set_level(logging.INFO)
    prompt = list(range(30, 70))
    for enforce_eager in (False, True):
        device = FakeDevice()
        fake = FakeFlashInfer(device, None)
        monkeypatch.setitem(sys.modules, "flashinfer", fake.module())
        executor = build(settings(model_path("llama"), enforce_eager=enforce_eager), device)
        assert generate(executor, prompt, 6) == generate_reference("llama", prompt, 6)
        assert (fake.num_captured_plans > 4) is not enforce_eager
        assert "Compiling attention kernels: 2 of 2, " in caplog.text
        assert "Warming up: 3 of 3, " in caplog.text
        assert ("Capturing CUDA graphs: " in caplog.text) is not enforce_eager
        caplog.clear()


def test_a_torch_without_cuda_is_refused_with_what_to_do(model_path: Callable[..., Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    config = settings(model_path("llama"))
    with pytest.raises(
        ConfigError, match=r"cannot use the CUDA device .* set runner.device to cpu"
    ):
        loading.load_on_cuda(config, ModelInfo(config.model))


def test_flashinfer_is_not_asked_for_what_it_lacks() -> None:
    def ask(key: int, value: int, dtype: torch.dtype, **options: Any) -> str | None:
        spec = KVCacheSpec((LayerSpec(2, key, value),), dtype)
        return why_not(spec, [AttentionCall(4, AttentionOptions(0.1, **options))], dtype)

    for head_dim in (64, 80, 96, 112, 128, 256, 512):
        assert ask(head_dim, head_dim, torch.bfloat16) is None
    assert ask(192, 128, torch.bfloat16) is None
    assert (
        ask(576, 512, torch.bfloat16)
        == "head sizes 576 and 512 of keys and values (its kernels have (64, 128, 256, 512))"
    )
    assert ask(128, 128, torch.float32) == "float32 queries"
    assert ask(64, 64, torch.float16, sinks=torch.zeros(4)) is None
    chunks = "attention in chunks, for which it has no kernel"
    assert ask(128, 128, torch.float16, chunk=64) == chunks


def test_captured_sizes_end_with_the_most_rows_that_there_can_be() -> None:
    assert capture_sizes(256)[:6] == (1, 2, 4, 8, 16, 24)
    assert len(capture_sizes(256)) == 23
    assert capture_sizes(256)[-3:] == (224, 240, 256)
    assert capture_sizes(1000)[-1] == 256
    assert capture_sizes(6) == (1, 2, 4, 6)
    assert capture_sizes(1) == (1,)


@pytest.mark.parametrize(
    "name", sorted(p.stem for p in (Path(loading.__file__).parent).glob("*.py"))
)
def test_every_module_can_be_imported_without_a_card(name: str) -> None:
    if name.startswith("triton"):
        pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    importlib.import_module(f"aioserve.gpu.cuda.{name}".removesuffix(".__init__"))


def test_a_model_that_cannot_be_captured_runs_without_graphs(
    model_path: Callable[..., Path],
    generate_reference: Callable[..., list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refusing(FakeDevice):
        def capture(self, work: Callable[[], None]) -> Callable[[], None]:
            super().capture(work)
            raise RuntimeError("operation not permitted when stream is capturing")

    executor = build(settings(model_path("llama")), Refusing())
    with torch.inference_mode():
        executor.capture((4, 8))
    assert "decode steps run without CUDA graphs: operation not permitted" in caplog.text
    prompt = list(range(30, 70))
    assert generate(executor, prompt, 6) == generate_reference("llama", prompt, 6)
