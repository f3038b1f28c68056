"""`--activations int8` on whole models: what it computes, what it says, and what it refuses.

The reference is `transformers` on the unpacked weights, whose linear layers get rows quantized by
torch (`tests/int8_activations.py`).
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aioserve.config import (
    EMBEDDED_MODEL,
    EngineConfig,
    ModelConfig,
    SpeculationConfig,
)
from aioserve.errors import ConfigError
from aioserve.features.spec_decode.drafts import find_draft
from aioserve.gpu.cuda.load import load_on_cuda
from aioserve.kernels import KernelsUnavailableError
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams
from aioserve.runner.cpu import models
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.runner.cpu.models import load_models
from aioserve.runner.cpu.products import BlockLinear
from tests.gguf_models import write_gguf
from tests.int8_activations import int8_products
from tests.models import VOCAB_SIZE, make_model
from tests.runner.driver import BLOCK_SIZE, NUM_BLOCKS, Driver, make_config
from tests.variants import needs_kernels

pytestmark = needs_kernels

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
PROMPT = [(7 * i * i + 3 * i) % VOCAB_SIZE for i in range(60)]


def mixed(name: str) -> str:
    """As llama.cpp mixes them, and one that no kernel knows."""
    if "attn_v" in name or "token_embd" in name:
        return "Q6_K"
    return "Q8_0" if "ffn_gate" in name else "F16" if "attn_output" in name else "Q4_K"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A GGUF file of a small model, all of whose products are quantized."""
    directory = make_model("llama", tmp_path / "float", **SIZES)
    return write_gguf(directory, tmp_path / "m.gguf", kind_of=lambda name: "Q4_1")


def read_prompt(config: EngineConfig, *beside: list[int]) -> Tensor:
    """Log probabilities of the tokens of `PROMPT`, read in one step with other prompts."""
    runner = load_on_cpu(config, ModelInfo(config.model))
    try:
        driver = Driver(runner, NUM_BLOCKS, BLOCK_SIZE)
        driver.add("a", PROMPT, SamplingParams(temperature=0, prompt_logprobs=0))
        for index, prompt in enumerate(beside):
            driver.add(str(index), prompt)
        return torch.tensor([entry.logprob for entry in driver.step().prompt_logprobs["a"]])
    finally:
        runner.close()


@torch.inference_mode()
def read_by_transformers(file: Path) -> Tensor:
    source = ModelInfo(ModelConfig(model=str(file))).source
    module: Any = source.load_module(torch.float32, torch.device("cpu"), "eager").eval()
    with int8_products(module):
        logits = module(torch.tensor([PROMPT]), use_cache=False).logits[0]
    ids = torch.tensor(PROMPT[1:])[:, None]
    return logits[:-1].float().log_softmax(-1).gather(1, ids)[:, 0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_is_as_likely_as_with_rows_quantized_by_torch(
    dtype: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In float32 as near as rare near ties between two bytes let it be."""
    with caplog.at_level(logging.INFO):
        found = read_prompt(make_config(file, dtype=dtype, activations="int8"))
    assert "LlamaForCausalLM, fused, int8 activations: " in caplog.text
    exact, expected = read_prompt(make_config(file, dtype="float32")), read_by_transformers(file)
    lost = (exact - expected).norm()
    assert 0.001 < lost / exact.norm() < 0.02
    assert (found - expected).norm() < (0.1 if dtype == "float32" else 2) * lost


def test_other_requests_in_a_step_change_nothing(file: Path) -> None:
    config = make_config(file, dtype="bfloat16", activations="int8")
    beside = [PROMPT[:n] for n in (1, 30, 45)]
    assert torch.equal(read_prompt(config), read_prompt(config, *beside))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # compiled whole, and layer by layer
def test_attention_multiplies_bytes_beside_an_int8_cache_alone(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_model(kind, tmp_path / "float")
    file = write_gguf(directory, tmp_path / "m.gguf", kind_of=lambda name: "Q8_0")
    settings: dict[str, Any] = {"dtype": "float32"}
    exact = read_prompt(make_config(file, **settings, kv_cache_dtype="int8"))
    by_floats = read_prompt(make_config(file, **settings, activations="int8"))
    assert "int8 products" not in caplog.text
    with caplog.at_level(logging.INFO):
        config = make_config(file, **settings, kv_cache_dtype="int8", activations="int8")
        found = read_prompt(config)
    assert ", int8 products, int8 cache; KV pool" in caplog.text
    for other in (exact, by_floats):
        assert 0.0005 < (found - other).norm() / other.norm() < 0.03
    beside = [PROMPT[:n] for n in (1, 30, 45)]
    if kind == "llama":  # what `transformers` computes of others may depend on the batch
        assert torch.equal(read_prompt(config, *beside), found)


def test_a_model_of_many_types_quantizes_rows_where_weights_are_quantized(tmp_path: Path) -> None:
    """A matrix that is stored as float16 is multiplied as without the setting."""
    directory = make_model("qwen3", tmp_path / "float", **SIZES)
    file = write_gguf(directory, tmp_path / "m.gguf", kind_of=mixed)
    found = read_prompt(make_config(file, dtype="float32", activations="int8"))
    exact = read_prompt(make_config(file, dtype="float32"))
    assert 0.001 < (found - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize(
    ("kind", "quantization"), [("llama", "int8"), ("llama", "int4"), ("mixtral", "int8")]
)
def test_weights_quantized_at_load_are_served_with_rows_of_int8(
    kind: str, quantization: str, tmp_path: Path
) -> None:
    """Those of experts, too."""
    directory = make_model(kind, tmp_path, **SIZES)
    settings: dict[str, Any] = {"dtype": "float32", "quantization": quantization}
    exact = read_prompt(make_config(directory, **settings))
    found = read_prompt(make_config(directory, **settings, activations="int8"))
    assert 0.001 < (found - exact).norm() / exact.norm() < 0.02


@torch.inference_mode()
def test_experts_quantize_the_rows_that_they_are_given(tmp_path: Path) -> None:
    directory, x = make_model("mixtral", tmp_path, **SIZES), torch.randn(5, 256)
    mixed = []
    for activations in (None, "int8"):
        settings = {"quantization": "int8", "activations": activations}
        config = make_config(directory, dtype="float32", **settings)
        model: Any = load_models(config, ModelInfo(config.model), None)[0]
        experts = model.decoder.layers[0].mlp
        mixed.append(experts.mix(x, experts.route(x)))
    assert 0.001 < (mixed[1] - mixed[0]).norm() / mixed[0].norm() < 0.02


def test_a_prepared_model_quantizes_rows_as_it_did_before(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings: dict[str, Any] = {"dtype": "float32", "keep_prepared": True}
    config = make_config(file, **settings, activations="int8")
    first = read_prompt(config)
    with caplog.at_level(logging.INFO):
        again = read_prompt(config)
        exact = read_prompt(make_config(file, **settings))
    assert caplog.text.count("as it was laid out in") == 1  # the exact model is another one
    assert caplog.text.count("fused, int8 activations: float32") == 1
    assert torch.equal(first, again)
    assert not torch.equal(first, exact)


def test_a_draft_model_keeps_exact_activations() -> None:
    config = EngineConfig(
        model=ModelConfig(quantization="int8", activations="int8"),
        speculation=SpeculationConfig(speculative_method="draft", draft_model=EMBEDDED_MODEL),
    )
    draft = find_draft(config, ModelInfo(config.model))
    assert draft is not None
    assert draft.info.config.quantization == "int8"
    assert draft.info.config.activations is None


def refusal(config: EngineConfig) -> str:
    with pytest.raises(ConfigError) as error:
        load_on_cpu(config, ModelInfo(config.model))
    return str(error.value)


def test_weights_that_are_not_quantized_are_refused_before_they_are_read(tmp_path: Path) -> None:
    directory = make_model("llama", tmp_path)
    (directory / "model.safetensors").write_bytes(b"")
    said = refusal(make_config(directory, activations="int8"))
    assert said.startswith("model.activations is 'int8', which is for quantized weights, and those")
    assert "add model.quantization int8 or int4 (--quantization)" in said


def test_a_file_without_a_quantized_weight_is_refused(tmp_path: Path) -> None:
    directory = make_model("llama", tmp_path / "float", **SIZES)
    file = write_gguf(directory, tmp_path / "m.gguf", kind_of=lambda name: "F16")
    said = refusal(make_config(file, activations="int8"))
    assert "add model.quantization int8 or int4 (--quantization), or take a model with" in said


def test_what_the_kernels_do_not_serve_whole_is_refused(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusal(make_config(file, activations="int8", fused=False))
    assert said == ("model.activations is 'int8', which needs model.fused: leave one of them out")

    def unavailable() -> None:
        raise KernelsUnavailableError("AIOSERVE_KERNELS=off")

    monkeypatch.setattr(models, "load_kernels", unavailable)
    said = refusal(make_config(file, activations="int8"))
    assert said.endswith("needs the compiled kernels of a CPU: AIOSERVE_KERNELS=off")


def test_a_model_that_is_not_like_llama_is_served_so(tmp_path: Path) -> None:
    directory = make_model("gemma2", tmp_path / "float")
    file = write_gguf(directory, tmp_path / "m.gguf", kind_of=lambda name: "Q8_0")
    config = make_config(file, activations="int8")
    runner = load_on_cpu(config, ModelInfo(config.model))
    try:
        model = runner._model
        assert model.name == "Gemma2ForCausalLM, int8 activations"
        quantized = [one for one in model.own if isinstance(one, BlockLinear)]
        assert len(quantized) > 7 * 3
        assert all(one.packed.is_int8 for one in quantized)
    finally:
        runner.close()


def test_a_gpu_is_refused(file: Path) -> None:
    config = make_config(file, activations="int8")
    with pytest.raises(ConfigError, match=r"needs the compiled kernels of a CPU: set runner\.dev"):
        load_on_cuda(config, ModelInfo(config.model))
