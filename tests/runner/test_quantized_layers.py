"""Models that are not fused, with `--quantization`: `transformers` with the weights dequantized.

The reference quantizes each weight of the files by itself and computes with what that stands for:
a layer that was left out, or whose weight lies elsewhere, shows in the logits.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from aioserve import AsyncEngine, EngineConfig
from aioserve.config import AdapterConfig, CacheConfig, ModelConfig, RunnerConfig
from aioserve.errors import ConfigError
from aioserve.features.quantized import quantize
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu.models import load_model_on_cpu
from tests.adapters import ATTENTION, make_adapter, merge
from tests.architectures import tiny
from tests.greedy import GreedyReference
from tests.int8_activations import int8_rows
from tests.kit import greedy, make_prompts, small_config
from tests.models import make_model
from tests.runner.test_stateful_models import MODELS
from tests.slow import mostly_slow
from tests.variants import needs_kernels

pytestmark = needs_kernels
on_uvloop = pytest.mark.asyncio(loop_factories=["uvloop"])

#: Layers that keep their numbers: routers, and what decides how fast states fade.
KEPT = {"gate", "router", "modality_router", "shared_expert_gate", "dt_proj"} | {
    *("in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj"),
}
INNER = {"int8": "Q8_0", "int4": "Q4_0"}
#: Linear attention, with experts and shared ones or without; Mamba 1 beside attention and experts,
#: Mamba 2; experts without gates; convolutions; latent attention; norms of gemma; one request at a
#: time; names that `transformers` gives anew, weights that it puts together and takes apart.
KINDS = (
    *("qwen3_5_moe_text", "nemotron_h", "jamba", "deepseek_v3", "bloom", "bailing_hybrid"),
    *("qwen3_5_text", "qwen3_next", "mamba", "mamba2", "granitemoehybrid", "falcon_h1", "bamba"),
    *("lfm2", "lfm2_moe", "gemma2", "glm4_moe", "mimo_v2_flash", "phi3", "deepseek_v32", "zamba2"),
    *("olmo_hybrid", "kimi_linear", "minimax", "dbrx", "gemma3n_text", "llama4_text"),
)
#: How far a logprob may be from that of the reference. Exponents of Mamba 2 are summed otherwise.
ROUNDING = {"nemotron_h": 1e-2, "zamba2": 1e-2}


def make_kind(kind: str, path: Path) -> Path:
    """Experts and halves of MLPs are whole groups of inputs."""
    fields = {"intermediate_size": 128, "shared_expert_intermediate_size": 64}
    fields["moe_intermediate_size"] = 64
    config = tiny.make_config(tiny.Case(kind))
    for name, value in fields.items():
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, value)
    tiny.make_model(config, path)
    return path


@torch.no_grad()
def dequantized(path: Path, bits: str, dtype: torch.dtype = torch.float32) -> Any:
    """The module of `transformers`, in float32, with what each quantized weight stands for."""
    module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    outer = (module.get_input_embeddings(), module.get_output_embeddings())
    seen: set[int] = set()

    def round_off(weight: Tensor, kind: str) -> None:
        if weight.shape[1] % 32 == 0:
            weight.copy_(quantize(weight.contiguous(), kind).dequantize(dtype))

    for name, part in module.named_modules():
        weight = getattr(part, "weight", None)
        is_matrix = type(part) is nn.Linear or (type(part) is nn.Embedding and part in outer)
        if is_matrix and id(weight) not in seen and KEPT.isdisjoint(name.split(".")):
            seen.add(id(weight))
            round_off(part.weight.data, "Q8_0" if part in outer else INNER[bits])
        for own in ("gate_up_proj", "up_proj", "down_proj") if hasattr(part, "has_gate") else ():
            for expert in getattr(part, own, ()):
                round_off(expert.data.T if part.is_transposed else expert.data, INNER[bits])
    return module


async def say(path: Path, **model: Any) -> tuple[list[int], list[float]]:
    """A reply to `PROMPT`, and the logprob of each token."""
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", skip_tokenizer_init=True, **model),
        cache=CacheConfig(num_kv_blocks=64),
        runner=RunnerConfig(threads=1),
    )
    params = msgspec.structs.replace(greedy(20), logprobs=0, detokenize=False)
    tokens: list[int] = []
    found: list[float] = []
    async with AsyncEngine(config) as engine:
        async for output in engine.generate(PROMPT, params):
            found += [one.logprob for one in output.logprobs or []]
            tokens += output.token_ids
    return tokens, found


@torch.inference_mode()
def logprobs_of(module: Any, tokens: list[int]) -> list[float]:
    """What a module of `transformers` says of a reply to `PROMPT`."""
    ids = torch.tensor([PROMPT + tokens])
    logits = module(ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    found: list[float] = (
        logits.float().log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0].tolist()
    )
    return found


PROMPT = [3 + 37 * place % 241 for place in range(30)]


@on_uvloop
@pytest.mark.parametrize(
    ("bits", "kind"),
    mostly_slow(
        [(bits, kind) for bits in INNER for kind in KINDS],
        but=[("int4", KINDS[0]), ("int4", KINDS[2])],
    ),
)
async def test_logprobs_are_those_of_transformers_with_the_dequantized_weights(
    bits: str, kind: str, tmp_path: Path
) -> None:
    path = make_kind(kind, tmp_path)
    tokens, found = await say(path, quantization=bits)
    expected = logprobs_of(dequantized(path, bits), tokens)
    assert found == pytest.approx(expected, abs=ROUNDING.get(kind, 1e-3))
    exact = logprobs_of(AutoModelForCausalLM.from_pretrained(path), tokens)
    assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) > 0.02


def stored_bytes(module: nn.Module) -> int:
    """Bytes that the parameters of a module take."""
    own = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()
    }
    return sum(own.values())


@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "deepseek_v32"])
def test_nothing_of_what_is_quantized_stays_as_numbers(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_kind(kind, tmp_path)
    whole = stored_bytes(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    config = ModelConfig(model=str(path), dtype="float32", quantization="int4")
    with caplog.at_level("INFO"):
        model: Any = load_model_on_cpu(config, ModelInfo(config))
    assert "Q4_0, Q8_0, multiplied as they are stored" in caplog.text
    assert stored_bytes(model.module) < whole / 20


def rounded(x: Tensor) -> Tensor:
    """Rows as they are when they are quantized to int8."""
    return int8_rows(x.reshape(-1, x.shape[-1])).to(x.dtype).view(x.shape)


@contextmanager
def int8_inputs(module: nn.Module) -> Iterator[None]:
    """Meanwhile every quantized layer of a module rounds what enters it, and so do experts."""

    def round_off(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (rounded(args[0]),)

    def mix(part: Any, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row, place in torch.cartesian_prod(*map(torch.arange, chosen.shape)).tolist():
            expert = int(chosen[row, place])
            inner = rounded(x[row : row + 1]) @ part.gate_up_proj[expert].T
            gate, up = inner.chunk(2, dim=-1)
            own = rounded(part.act_fn(gate) * up) @ part.down_proj[expert].T
            out[row] += shares[row, place] * own[0]
        return out

    handles = []
    for name, part in module.named_modules():
        if type(part) is nn.Linear and KEPT.isdisjoint(name.split(".")):
            handles.append(part.register_forward_pre_hook(round_off))
        elif hasattr(part, "has_gate"):
            part.forward = partial(mix, part)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@on_uvloop
@pytest.mark.parametrize(
    "kind", mostly_slow(["lfm2", "lfm2_moe", "jamba", "glm4_moe"], but=["jamba", "glm4_moe"])
)
async def test_activations_are_rounded_in_every_quantized_layer(kind: str, tmp_path: Path) -> None:
    path = make_kind(kind, tmp_path)
    tokens, found = await say(path, quantization="int8", activations="int8")
    module = dequantized(path, "int8")
    exact = logprobs_of(module, tokens)
    assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) > 0.02
    with int8_inputs(module):
        assert found == pytest.approx(logprobs_of(module, tokens), abs=1e-3)


@on_uvloop
async def test_adapters_are_added_to_quantized_layers(tmp_path: Path) -> None:
    """Beside a request without any."""
    base = make_model("qwen3_5_text", tmp_path / "base", **MODELS["qwen3_5_text"])
    targets = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    adapter = make_adapter(base, tmp_path / "adapter", targets=targets)
    plain = tmp_path / "plain"
    dequantized(base, "int4").save_pretrained(plain)
    merged = merge(plain, adapter, tmp_path / "merged")
    config = small_config(
        base,
        adapters=AdapterConfig(lora=(f"one={adapter}",)),
        cache=CacheConfig(num_kv_blocks=64, num_state_slots=16),
    )
    model = msgspec.structs.replace(config.model, quantization="int4")
    prompts = make_prompts()[3:6]
    async with AsyncEngine(msgspec.structs.replace(config, model=model)) as engine:

        async def tell(prompt: list[int], name: str | None) -> list[int]:
            stream = engine.generate(prompt, greedy(12), adapter=name)
            return [token async for output in stream for token in output.token_ids]

        asked = [(prompt, name) for prompt in prompts for name in (None, "one")]
        found = await asyncio.gather(*(tell(*one) for one in asked))
    by_name = {None: plain, "one": merged}
    references = {name: GreedyReference(path, torch.float32) for name, path in by_name.items()}
    assert found == [references[name].tokens(prompt, 12) for prompt, name in asked]


def test_layers_of_another_class_are_refused(tmp_path: Path) -> None:
    path = make_kind("gpt2", tmp_path)
    config = ModelConfig(model=str(path), quantization="int8")
    with pytest.raises(ConfigError, match="do not multiply with quantized layers of GPT2LMHeadM"):
        load_model_on_cpu(config, ModelInfo(config))
