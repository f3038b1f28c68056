"""Layers of every kind that flashinfer serves, by stand-ins of its wrappers: the right tokens."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aioserve.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.engine import AsyncEngine
from aioserve.errors import ConfigError
from aioserve.features.spec_decode.drafts import find_draft
from aioserve.gpu.cuda import flashinfer_attention
from aioserve.gpu.cuda import load as loading
from aioserve.gpu.cuda.executor import StepExecutor
from aioserve.gpu.cuda.flashinfer_attention import FlashInferAttention, stored_spec, why_not
from aioserve.gpu.cuda.fused import CudaPlace
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.attention.backend import (
    AttentionCall,
    AttentionOptions,
    KVCacheSpec,
    LayerSpec,
)
from aioserve.scheduler.output import SchedulerOutput
from tests.adapters import make_adapter
from tests.architectures.tiny import Case, make_model
from tests.architectures.tiny import make_config as make_model_config
from tests.greedy import GreedyReference
from tests.mtp_models import make_mtp_model
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.fake_flashinfer import FakeFlashInfer
from tests.runner.cuda.on_device import make_device_runner
from tests.runner.driver import Driver, make_config
from tests.slow import mostly_slow

LATENTS: dict[str, Any] = {"kv_lora_rank": 128}  # the least that there are kernels for
#: By what is special about them: a model, and how wide its heads are stored, K and V.
KINDS: dict[str, tuple[str, dict[str, Any], set[tuple[int, int]]]] = {
    "heads of 80": ("llama", {"head_dim": 80}, {(128, 128)}),
    "heads of 96": ("llama", {"head_dim": 96}, {(128, 128)}),
    "heads of 112": ("qwen3", {"head_dim": 112}, {(128, 128)}),
    "heads of 192 and 128": (
        "mimo_v2_flash",
        {"head_dim": 192, "v_head_dim": 128, "swa_head_dim": 192, "swa_v_head_dim": 128},
        {(256, 256)},
    ),
    "sinks beside windows": ("gpt_oss", {"head_dim": 64}, {(64, 64)}),
    "latents": ("deepseek_v3", LATENTS, {(192, 128)}),
    "latents, no q_lora": ("deepseek_v2", LATENTS | {"q_lora_rank": None}, {(192, 128)}),
    "latents, 6 heads": (
        "glm4_moe_lite",
        LATENTS | {"num_attention_heads": 6, "num_key_value_heads": 6},
        {(192, 128)},
    ),
}


@dataclass
class Served:
    """One model on the fake device, with flashinfer's stand-in or plain torch."""

    executor: StepExecutor
    fake: FakeFlashInfer
    device: FakeDevice
    sizes: set[tuple[int, int]] = field(default_factory=set)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Replies to prompts of which the last is computed in two pieces, beside decodes."""
        executor = self.executor

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
        *first, last = prompts
        for name, prompt in enumerate(first):
            driver.add(str(name), prompt)
            driver.step({str(name): len(prompt)})
        names = [str(name) for name in range(len(first))]
        driver.add("last", last)
        driver.step({**dict.fromkeys(names, 1), "last": 7})
        driver.step({**dict.fromkeys(names, 1), "last": len(last) - 7})
        for _ in range(num_tokens):
            driver.step()
        return [driver.sequences[name].output[:num_tokens] for name in [*names, "last"]]


@torch.inference_mode()
def serve(path: Path, monkeypatch: pytest.MonkeyPatch, **runner: Any) -> Served:
    """As `load_on_cuda` does it, in float32, which flashinfer itself does not serve."""
    fused, is_plain = runner.pop("fused", False), runner.pop("is_plain", False)
    config = EngineConfig(
        model=make_config(path, max_model_len=200, fused=fused, dtype="float32").model,
        cache=CacheConfig(
            block_size=8, num_kv_blocks=128, kv_cache_dtype=runner.pop("kv_cache_dtype", "auto")
        ),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        runner=RunnerConfig(**runner),
    )

    def as_halves(spec: Any, calls: Any, dtype: Any, num_tokens: int) -> str | None:
        return "what is asked" if is_plain else why_not(spec, calls, torch.bfloat16, num_tokens)

    device = FakeDevice(eagerness=0.3)
    fake = FakeFlashInfer(device, None)
    monkeypatch.setattr(loading, "why_not", as_halves)
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1)  # no stand-in uses it
    monkeypatch.setitem(sys.modules, "flashinfer", fake.module())
    info = ModelInfo(config.model)
    place = CudaPlace(torch.device("cpu"), has_triton=False)
    model, _ = loading.load_models(config, info, None, place)
    executor = loading.make_executor(config, info, model, device, device.card())
    cache = executor._attention.cache
    sizes = {
        (key.shape[3], value.shape[3]) for key, value in zip(cache.keys, cache.values, strict=True)
    }
    return Served(executor, fake, device, sizes)


def make(path: Path, kind: str, **fields: Any) -> Path:
    make_model(make_model_config(Case(kind, fields=tuple(fields.items()))), path)
    return path


PROMPTS = [list(range(30, 63)), [7, 3, 200], list(range(90, 110))]


def check_tokens(served: Served, path: Path, num_tokens: int = 6) -> None:
    reference = GreedyReference(path, torch.float32)
    replies = served.generate(PROMPTS, num_tokens)
    for prompt, reply in zip(PROMPTS, replies, strict=True):
        assert reply == reference.tokens(prompt, num_tokens)


#: In `make test`: each kind of head or state once.
FEW = ("heads of 80", "heads of 192 and 128", "sinks beside windows", "latents, 6 heads")


@pytest.mark.parametrize("name", mostly_slow(KINDS, but=FEW))
def test_every_kind_of_layer_gives_the_tokens_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts, decodes beside them, and decodes from CUDA graphs, padded."""
    kind, fields, sizes = KINDS[name]
    path = make(tmp_path / "model", kind, **fields)
    served = serve(path, monkeypatch)
    assert "plain torch" not in caplog.text
    assert isinstance(served.executor._attention, FlashInferAttention)
    assert served.sizes == sizes
    before = served.fake.num_captured_plans
    check_tokens(served, path)
    assert served.fake.num_captured_plans > before  # decodes were replayed


def test_heads_of_fused_layers_are_stored_wider_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "model", "llama", head_dim=96)
    served = serve(path, monkeypatch, fused=True)
    assert "fused" in served.executor._model.name
    assert served.sizes == {(128, 128)}
    check_tokens(served, path)


def test_latent_states_give_the_same_tokens_without_flashinfer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path / "model", "deepseek_v3")
    served = serve(path, monkeypatch)  # whose states of 16 have no kernel
    assert not isinstance(served.executor._attention, FlashInferAttention)
    assert served.sizes == {(24, 16)}
    check_tokens(served, path)


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
def test_wider_heads_and_latent_states_are_served_in_fp8(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tokens of plain torch on a cache of fp8: they differ from those of a wider one."""
    fields = LATENTS if kind == "deepseek_v3" else {"head_dim": 96}
    path = make(tmp_path / "model", kind, **fields)
    served = serve(path, monkeypatch, kv_cache_dtype="fp8")
    assert {cache.dtype for cache in served.executor._attention.cache.tensors} == {
        torch.float8_e4m3fn
    }
    plain = serve(path, monkeypatch, kv_cache_dtype="fp8", is_plain=True)
    assert not isinstance(plain.executor._attention, FlashInferAttention)
    assert served.generate(PROMPTS, 6) == plain.generate(PROMPTS, 6)


def test_a_latent_state_is_kept_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(make(tmp_path / "model", "deepseek_v3", **LATENTS), monkeypatch)
    cache = served.executor._attention.cache
    assert cache.values[0].data_ptr() == cache.keys[0].data_ptr()
    assert len(cache.tensors) == len(cache.keys)
    blocks = served.executor.make_host_blocks(1 << 20)
    assert blocks.block_bytes == len(cache.keys) * 8 * (128 + 64) * 4


def test_an_mtp_layer_keeps_latent_states_too(tmp_path: Path) -> None:
    path = make_mtp_model("deepseek_v3", tmp_path / "model", **LATENTS)
    config = msgspec.structs.replace(
        make_config(path), speculation=SpeculationConfig(speculative_method="mtp")
    )
    info = ModelInfo(config.model)
    place = CudaPlace(torch.device("cpu"), has_triton=False)
    model, draft = loading.load_models(config, info, find_draft(config, info), place)
    assert draft is not None
    layers = [*model.kv_cache_spec.layers, *draft.kv_cache_spec.layers]
    assert len(layers) == 4
    assert all(layer.is_latent for layer in layers)


async def test_an_adapter_for_what_makes_keys_of_latent_states_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path / "model", "deepseek_v3", **LATENTS)
    config = make_config(path, skip_tokenizer_init=True, fused=False)

    async def start(target: str) -> None:
        adapter = make_adapter(path, tmp_path / target, rank=2, targets=(target,))
        adapters = AdapterConfig(lora=(f"one={adapter}",))
        own = msgspec.structs.replace(config, adapters=adapters)
        async with AsyncEngine(own, runner=make_device_runner(own, FakeDevice())):
            pass

    await start("kv_a_proj_with_mqa")
    with pytest.raises(ConfigError, match="kv_b_proj"):
        await start("kv_b_proj")


def test_a_module_whose_keys_are_no_products_of_its_weights_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compute something else in latent states; so each head's keys and values are kept."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

    expand = DeepseekV3Attention.expand_kv

    def doubled(self: Any, states: torch.Tensor, turned: torch.Tensor) -> Any:
        key, value = expand(self, states, turned)
        return key, 2 * value

    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", doubled)
    path = make(tmp_path / "model", "deepseek_v3", **LATENTS)
    served = serve(path, monkeypatch)
    assert served.sizes == {(64, 64)}
    check_tokens(served, path)


def spec_of(layer: LayerSpec) -> KVCacheSpec:
    return KVCacheSpec((layer,), torch.bfloat16)


@pytest.mark.parametrize(
    ("head_dims", "stored"),
    [
        ((16, 16), 64),
        ((64, 64), 64),
        ((80, 80), 128),
        ((112, 112), 128),
        ((192, 128), 256),
        ((320, 320), 512),
    ],
)
def test_bytes_are_those_of_heads_as_they_are_stored(
    head_dims: tuple[int, int], stored: int
) -> None:
    spec = spec_of(LayerSpec(2, *head_dims))
    assert stored_spec(spec).bytes_per_token == 2 * 2 * stored * 2
    assert spec.bytes_per_token == 2 * sum(head_dims) * 2


def test_bytes_of_latent_states_are_those_of_keys_alone() -> None:
    spec = spec_of(LayerSpec(1, 576, 512, is_latent=True))
    assert spec.bytes_per_token == stored_spec(spec).bytes_per_token == 576 * 2
    narrow = spec_of(LayerSpec(1, 288, 256, is_latent=True))
    assert stored_spec(narrow).bytes_per_token == (256 + 64) * 2


@pytest.mark.parametrize(
    ("layer", "num_heads", "options", "num_tokens", "said"),
    [
        (LayerSpec(1, 576, 512, is_latent=True), 256, {}, 1, "latent attention of 256 heads"),
        (LayerSpec(1, 24, 16, is_latent=True), 4, {}, 1, "latent states of 16 (its kernels have"),
        (LayerSpec(1, 576, 512, is_latent=True), 128, {}, 15_001, "at most 15000: lower sched"),
        (LayerSpec(1, 576, 512, is_latent=True), 16, {"softcap": 5.0}, 1, "for which it has no k"),
        (LayerSpec(1, 576, 512), 2, {}, 1, "head sizes 576 and 512 of keys and values"),
        (LayerSpec(1, 64, 64), 2, {"chunk": 64}, 1, "attention in chunks, for which it has no"),
    ],
)
def test_what_has_no_kernel_is_named(
    layer: LayerSpec, num_heads: int, options: dict[str, Any], num_tokens: int, said: str
) -> None:
    call = AttentionCall(num_heads, AttentionOptions(0.1, **options))
    told = why_not(spec_of(layer), [call], torch.bfloat16, num_tokens)
    assert told is not None
    assert said in told


def test_sinks_beside_a_soft_cap_have_no_kernel() -> None:
    options = AttentionOptions(0.1, softcap=5.0, sinks=torch.zeros(2))
    told = why_not(spec_of(LayerSpec(1, 64, 64)), [AttentionCall(2, options)], torch.bfloat16)
    assert told == "attention sinks beside soft caps, for which it has no kernel"


@pytest.mark.parametrize(("num_heads", "given"), [(1, 1), (16, 16), (20, 32), (40, 64), (128, 128)])
def test_latent_attention_gets_heads_that_fill_tiles(num_heads: int, given: int) -> None:
    call = AttentionCall(num_heads, AttentionOptions(0.1))
    spec = spec_of(LayerSpec(1, 576, 512, is_latent=True))
    (kind,) = flashinfer_attention._kinds(spec, [call], 100)
    assert kind.num_heads == given
