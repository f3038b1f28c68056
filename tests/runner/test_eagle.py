"""EAGLE-3 heads with random weights: what they guess is what a plain reference guesses, and what is
said does not change.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

import aioserve
from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from aioserve.errors import ConfigError
from aioserve.features.spec_decode.model_drafter import HeadDrafter, ModelDraftLength
from aioserve.gpu.cuda import flashinfer_attention
from aioserve.gpu.cuda import load as cuda_load
from aioserve.gpu.cuda.executor import capture_sizes
from aioserve.runner.interface import RunnerInterface
from tests.eagle_models import DIM, EPS, LAYERS, THETA, make_head
from tests.models import make_model
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.fake_flashinfer import FakeFlashInfer
from tests.runner.cuda.on_device import make_device_runner
from tests.runner.test_stateful_models import MODELS
from tests.slow import mostly_slow

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

EMBEDDED = Path(aioserve.__file__).parent / "model_source" / "embedded"


class Reference:
    """The same head in plain torch, over whole texts, and its model by `transformers`."""

    def __init__(self, path: Path, model: Path) -> None:
        from safetensors.torch import load_file

        self.weights = load_file(path / "model.safetensors")
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.inference_mode()
    def guess(self, text: Sequence[int], count: int) -> list[int]:
        """The most likely of the FEW tokens after `text`, one after another."""
        hidden = self.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        states = torch.cat([hidden[layer][0] for layer in LAYERS], dim=-1)
        states, text = states @ self.weights["fc.weight"].T, list(text)
        for _ in range(count):
            out = self._layer(torch.tensor(text[1:]), states)
            logits = self._norm(out[-1], "norm") @ self.weights["lm_head.weight"].T
            best = max((token_id // 3 for token_id in FEW), key=logits.tolist().__getitem__)
            text.append(best + int(self.weights["d2t"][best]))
            states = torch.cat((states, out[-1:]))
        return text[-count:]

    def _layer(self, token_ids: Tensor, states: Tensor) -> Tensor:
        def linear(x: Tensor, name: str) -> Tensor:
            return x @ self.weights[f"midlayer.{name}_proj.weight"].T

        embedded = self.model.get_input_embeddings()(token_ids)
        x = torch.cat(
            (
                self._norm(embedded, "midlayer.input_layernorm"),
                self._norm(states, "midlayer.hidden_norm"),
            ),
            dim=-1,
        )
        query, key, value = (
            linear(x, f"self_attn.{name}").view(len(x), -1, DIM).transpose(0, 1) for name in "qkv"
        )
        attended = F.scaled_dot_product_attention(
            _turn(query), _turn(key), value, is_causal=True, enable_gqa=True
        )
        x = states + linear(attended.transpose(0, 1).reshape(len(x), -1), "self_attn.o")
        y = self._norm(x, "midlayer.post_attention_layernorm")
        return x + linear(F.silu(linear(y, "mlp.gate")) * linear(y, "mlp.up"), "mlp.down")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return x * self.weights[f"{name}.weight"]


def _turn(x: Tensor) -> Tensor:
    """Rotary positions 0, 1, ... of `x` [heads, T, DIM]."""
    rates = THETA ** (-torch.arange(0, DIM, 2) / DIM)
    angles = torch.arange(x.shape[1])[:, None] * rates
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


@pytest.fixture(autouse=True)
def every_draft_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What pays depends on how busy the machine is."""

    def stepped(self: ModelDraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6

    monkeypatch.setattr(ModelDraftLength, "stepped", stepped)


FEW = (300, 303, 306, 309)  # of so few, a head that knows nothing is often right
WAYS: list[dict[str, Any]] = [
    {"temperature": 0, "allowed_token_ids": list(FEW)},
    {"temperature": 0, "allowed_token_ids": list(FEW), "prompt_logprobs": 1},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "stop": ["\n"]},
]


def make_hybrid(path: Path) -> Path:
    """A model with states, of the sizes of the embedded one and with its tokenizer."""
    layers = ["linear_attention", "full_attention"] * 3
    sizes = {"vocab_size": 2048, "hidden_size": 192, "num_hidden_layers": 6, "layer_types": layers}
    make_model("qwen3_5_text", path, **MODELS["qwen3_5_text"] | sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, path)
    return path


async def say(
    head: Path | None,
    make_runner: Callable[[EngineConfig], RunnerInterface] | None = None,
    **model: Any,
) -> list[list[int]]:
    """Four at a time in a pool that is too small for them, and two that find a cached prefix."""
    speculation = SpeculationConfig(speculative_method="none")
    if head is not None:
        speculation = SpeculationConfig(
            speculative_method="draft", draft_model=str(head), num_speculative_tokens=3
        )
    config = EngineConfig(
        model=ModelConfig(max_model_len=100, dtype="float32", **model),
        cache=CacheConfig(block_size=4, num_kv_blocks=26),
        scheduler=SchedulerConfig(max_num_batched_tokens=16, pipeline_depth=1),
        speculation=speculation,
    )
    runner = None if make_runner is None else make_runner(config)
    async with AsyncEngine(config, runner=runner) as engine:

        async def one(number: int, way: dict[str, Any]) -> list[int]:
            params = SamplingParams(**{"max_tokens": 30, "seed": 5} | way)
            prompt = f"KING: My lord, what says the {['queen', 'crown', 'sun'][number % 3]}"
            found: list[int] = []
            async for output in engine.generate(prompt, params):
                found += output.token_ids
            return found

        said = await asyncio.gather(*(one(number, way) for number, way in enumerate(WAYS)))
        said += await asyncio.gather(*(one(number, WAYS[number]) for number in (0, 2)))
        stats = engine.get_stats()
        assert stats is not None
        assert stats.num_preemptions
        assert stats.num_prefix_hit_tokens
        assert (stats.num_accepted_tokens > 10) == (head is not None)
        return said


@pytest.mark.parametrize("side", mostly_slow(["cpu", "cuda", "not fused", "states"], but=["cuda"]))
async def test_a_head_guesses_what_a_plain_reference_guesses(
    side: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After preemptions, on cached prefixes, and behind guesses that were wrong; and every text is
    what it is without the head. "cuda": on a device that computes as late as it may, and replays
    decodes.
    """
    head, model = make_head(tmp_path / "head"), dict[str, Any]()
    if side == "not fused":
        model["fused"] = False
    if side == "states":
        model["model"] = str(make_hybrid(tmp_path / "hybrid"))
    reference = Reference(head, Path(model.get("model", EMBEDDED)))
    guesses = HeadDrafter.guesses
    compared: list[tuple[list[int], list[int]]] = []  # what raised there would be logged alone

    def checked(self: HeadDrafter, *arguments: Any) -> dict[int, list[int]]:
        found = guesses(self, *arguments)
        texts = arguments[-1]
        for row, own in found.items():
            (known,) = texts.batch.num_tokens([row])
            one, begin, end = (torch.tensor([n]).numpy() for n in (row, 0, int(known)))
            if texts.sampling.select(one, end).temperature[0] == 0:
                text = texts.batch.pack(one, begin, end).input_ids.tolist()
                compared.append((own, reference.guess(text, len(own))))
        return found

    monkeypatch.setattr(HeadDrafter, "guesses", checked)
    make_runner = None
    if side == "cuda":
        device = FakeDevice(1, eagerness=0.3)
        flashinfer = FakeFlashInfer(device, None)
        monkeypatch.setattr(cuda_load, "find_flashinfer", lambda *_: flashinfer)
        # the stand-in has no use for it
        monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1)
        make_runner = partial(make_device_runner, device=device)
    assert await say(head, make_runner, **model) == await say(None, **model)
    if side == "cuda":
        assert flashinfer.num_captured_plans > len(capture_sizes(16))  # and some were replayed
    assert len(compared) > 40
    assert all(own == expected for own, expected in compared)


async def refusal(path: Path, **model: Any) -> str:
    config = EngineConfig(
        model=ModelConfig(**model),
        speculation=SpeculationConfig(speculative_method="draft", draft_model=str(path)),
    )
    with pytest.raises(ConfigError) as caught:
        async with AsyncEngine(config):
            pass
    return str(caught.value)


async def test_a_head_that_cannot_work_is_refused_in_one_line(tmp_path: Path) -> None:
    deep = make_head(tmp_path / "deep", num_hidden_layers=2)
    assert "it has 2 layers, only one is known" in await refusal(deep)
    other = make_head(tmp_path / "other", vocab_size=4096)
    assert "it is for 4,096 tokens, the model has 2,048" in await refusal(other)
    wide = make_head(tmp_path / "wide", intermediate_size=128)
    assert "mlp.gate_proj.weight is [96, 192], not [128, 192]" in await refusal(wide)
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 3, 9]}
    high = make_head(tmp_path / "high", eagle_config=layers)
    assert "looks at layers (1, 3, 9): three of the 6" in await refusal(high)
    sizes = {"vocab_size": 2048, "hidden_size": 192, "num_hidden_layers": 6}
    bloom = make_model("bloom", tmp_path / "bloom", **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, bloom)
    said = await refusal(make_head(tmp_path / "right"), model=str(bloom), max_model_len=100)
    assert "does not tell what enters its layers, which an EAGLE-3 head needs" in said
