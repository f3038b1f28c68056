"""Models whose weights stay quantized as a file has them, against the same weights unpacked.

The reference is `transformers` on what the package gguf unpacks, which shares no code with ours.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from aioserve import AsyncEngine
from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.features.gguf import GgufFile
from aioserve.features.quantized import FORMATS, quantize
from aioserve.kernels import load_kernels
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.fused import WholeDecoder
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.runner.cpu.models import load_model_on_cpu
from aioserve.runner.cpu.products import BlockLinear
from aioserve.runner.fused import fuse as fused
from aioserve.runner.fused.recognize import find_parts
from aioserve.runner.loader import named_dtype
from tests.gguf_models import write_gguf
from tests.gguf_written import WRITTEN, make_written
from tests.greedy import GreedyReference
from tests.kit import greedy, tokens_of
from tests.models import VOCAB_SIZE, make_model
from tests.runner.driver import Driver, make_config
from tests.variants import DTYPES, needs_kernels

pytestmark = needs_kernels

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
PROMPTS = {"a": [7], "b": [5, 80, 7, 511, 2] * 8, "c": [250, 3, 3] * 5}


def mixed(name: str) -> str:
    """As llama.cpp mixes them, and one that no kernel knows."""
    if "attn_v" in name or "token_embd" in name:
        return "Q6_K"
    return "Q8_0" if "ffn_gate" in name else "F16" if "attn_output" in name else "Q4_K"


def write(path: Path, kind: str, kind_of: Callable[[str], str]) -> Path:
    directory = make_model(kind, path / "float", **SIZES)
    return write_gguf(directory, path / "m.gguf", kind_of=kind_of)


def reference(file: Path, dtype: str) -> GreedyReference:
    """`transformers` on the weights of `file`, unpacked by the package gguf."""
    place = file.parent / "unpacked"
    if not place.exists():
        source = ModelInfo(ModelConfig(model=str(file))).source
        module = source.load_module(torch.float32, torch.device("cpu"), "eager")
        module.config.eos_token_id = module.generation_config.eos_token_id = None  # go on and on
        module.save_pretrained(place)
    return GreedyReference(place, named_dtype(dtype))


def check(file: Path, dtype: str, caplog: Any, said: str, **settings: Any) -> None:
    config = make_config(file, dtype=dtype, **settings)
    with caplog.at_level("INFO"):
        runner = load_on_cpu(config, ModelInfo(config.model))
    try:
        assert said in caplog.text
        if said.endswith("as they are stored"):
            assert isinstance(runner._model.decoder, WholeDecoder)
        driver = Driver(runner, 128, 8)
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        driver.step({"a": 1, "b": 9})
        driver.step({"b": 30, "a": 1, "c": 15})
        for _ in range(9):
            driver.step()
        expected = reference(file, dtype)
        for name, prompt in PROMPTS.items():
            output = driver.sequences[name].output
            assert len(output) > 8
            assert output == expected.tokens(prompt, len(output)), name
    finally:
        runner.close()


@pytest.mark.parametrize("kind", FORMATS)
def test_tokens_are_those_of_the_unpacked_weights(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path, "llama", lambda name: kind)
    check(file, "float32", caplog, f"{kind}, multiplied as they are stored")


def test_a_model_of_many_types_is_served_in_every_type_of_its_activations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its queries, keys and values are of two types in one product; one weight has its own type."""
    file = write(tmp_path, "qwen3", mixed)
    for dtype in DTYPES:
        check(file, dtype, caplog, "Q4_K, Q6_K, Q8_0, multiplied as they are stored")


@pytest.mark.parametrize("is_file", [True, False])
def test_weights_are_never_all_unpacked(
    is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part of the model has its numbers at a time, and a layer that is laid out is let go."""
    path = make_model("llama", tmp_path / "whole", num_hidden_layers=4, hidden_size=128)
    settings: dict[str, Any] = {"quantization": "int8"}
    if is_file:
        path = write_gguf(path, tmp_path / "m.gguf", kind_of=lambda name: "Q8_0")
        settings = {}
    held: list[int] = []
    layers_left: list[int] = []
    modules: list[Any] = []

    def find(module: Any, *args: Any) -> Any:
        modules.append(module)
        for part in module.modules():
            if type(part) is torch.nn.Linear:
                part.register_forward_hook(lambda *_: held.append(num_bytes()))
        return find_parts(module, *args)

    def num_bytes() -> int:
        matrices = [p for p in modules[0].parameters() if p.ndim == 2]
        return sum(p.untyped_storage().nbytes() for p in matrices)

    def check_layer(self: Any, *args: Any) -> None:
        layers = modules[0].model.layers
        layers_left.append(sum("weight" in layer.mlp.down_proj._parameters for layer in layers))
        right(self, *args)

    right = fused.Proof.check_layer
    monkeypatch.setattr(fused, "find_parts", find)
    monkeypatch.setattr(fused.Proof, "check_layer", check_layer)
    config = make_config(path, dtype="float32", **settings).model
    assert load_model_on_cpu(config, ModelInfo(config)).is_compiled
    assert len(held) == 4 * 7 + 1
    assert max(held) < 1.2 * 4 * VOCAB_SIZE * 128  # one matrix, and what stands in for the others
    assert layers_left == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("setting", "group", "inner", "outer"),
    [
        ("int8", 32, "Q8_0", "Q8_0"),
        ("int4", 32, "Q4_0", "Q8_0"),
        ("int8", 64, "int8/64", "int8/64"),
        ("int4", 128, "int4/128", "int8/128"),
    ],
)
def test_tokens_are_those_of_weights_rounded_at_load(
    setting: str,
    group: int,
    inner: str,
    outer: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = make_model("qwen3", tmp_path / "whole", **SIZES)  # tied
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            rounded = quantize(parameter.data, outer if "embed" in name else inner)
            parameter.data.copy_(rounded.dequantize(torch.float32))
    module.save_pretrained(tmp_path / "unpacked")
    said = f"weights, {', '.join(sorted({inner, outer}))}, multiplied"
    settings = {"quantization": setting, "quantization_group_size": group}
    check(directory, "float32", caplog, said, **settings)


def test_a_body_stored_by_itself_is_rounded_as_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As models for embeddings are: its names have no prefix, and the tied head is not there."""
    for name in ("whole", "body"):
        directory = make_model("qwen3", tmp_path / name)
    file = directory / "model.safetensors"
    weights = {name.removeprefix("model."): weight for name, weight in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    logits = []
    for name in ("whole", "body"):
        config = make_config(tmp_path / name, dtype="float32", quantization="int8").model
        with caplog.at_level("INFO"):
            model = load_model_on_cpu(config, ModelInfo(config))
        logits.append(model.logits(torch.ones(1, 64)))
    assert caplog.text.count("Q8_0, multiplied as they are stored") == 2
    assert torch.equal(*logits)


def test_a_group_size_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    directory = make_model("llama", tmp_path)  # 64, and 96 between
    settings = {"quantization": "int4", "quantization_group_size": 64}
    config = make_config(directory, **settings)
    refusal = r"group_size is 64, but model\.layers\.\d\.mlp\.down_proj\.weight has 96 inputs"
    with pytest.raises(ConfigError, match=refusal):
        load_on_cpu(config, ModelInfo(config.model))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_are_quantized_as_they_are_loaded(
    kind: str, quantization: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each expert's rows, whichever way they lie; tokens are those of the rounded weights."""
    directory = make_model(kind, tmp_path / "float")
    inner, outer = {"int8": ("Q8_0", "Q8_0"), "int4": ("Q4_0", "Q8_0")}[quantization]
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 3 and "bias" not in name:
            for numbers in parameter.data:
                own = numbers.T if kind == "gpt_oss" else numbers
                own.copy_(quantize(own.contiguous(), inner).dequantize(torch.float32))
        elif parameter.dim() == 2 and "router" not in name and "gate.weight" not in name:
            if "bias" not in name:
                kept = outer if "embed" in name or "lm_head" in name else inner
                parameter.data.copy_(quantize(parameter.data, kept).dequantize(torch.float32))
    module.save_pretrained(tmp_path / "rounded")
    expected = GreedyReference(tmp_path / "rounded", torch.float32)
    config = make_config(directory, dtype="float32", quantization=quantization)
    with caplog.at_level("INFO"):
        runner = load_on_cpu(config, ModelInfo(config.model))
    try:
        assert "multiplied as they are stored" in caplog.text
        experts = runner._model.decoder.layers[0].mlp  # type: ignore[attr-defined]
        assert {type(part) for part in (*experts._gate_up, *experts._down)} == {BlockLinear}
        driver = Driver(runner, 128, 8)
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        for _ in range(9):
            driver.step()
        for name, prompt in PROMPTS.items():
            output = driver.sequences[name].output
            assert output == expected.tokens(prompt, len(output)), name
    finally:
        runner.close()


def test_quantization_is_refused_where_nothing_multiplies_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(path: Path, **settings: Any) -> str:
        config = make_config(path, quantization="int8", **settings)
        with pytest.raises(ConfigError, match=r"model\.quantization is 'int8'") as caught:
            load_on_cpu(config, ModelInfo(config.model))
        return str(caught.value)

    llama = make_model("llama", tmp_path / "llama")
    assert "is a GGUF file" in refusal(write_gguf(llama, tmp_path / "m.gguf"))
    assert "needs the compiled kernels" in refusal(llama, fused=False)
    monkeypatch.setenv("AIOSERVE_KERNELS", "off")
    load_kernels.cache_clear()
    assert "needs the compiled kernels" in refusal(llama)
    monkeypatch.undo()
    load_kernels.cache_clear()


def test_a_type_that_no_kernel_knows_is_unpacked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A block of IQ4_NL has as many bytes as one of Q4_0, and so a file of those can have some."""
    file = write(tmp_path, "llama", lambda name: "Q4_0")
    data, name = bytearray(file.read_bytes()), b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # after its two dimensions
    assert data[at] == gguf.GGMLQuantizationType.Q4_0
    data[at] = gguf.GGMLQuantizationType.IQ4_NL
    file.write_bytes(data)
    check(file, "float32", caplog, "Q4_0, multiplied as they are stored")
    assert "0 MB of IQ4_NL are unpacked to float32" in caplog.text


def test_a_model_that_is_not_fused_multiplies_with_the_weights_of_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "gemma2", mixed)
    check(file, "float32", caplog, "Q8_0, multiplied as they are")
    config = make_config(file, dtype="float32").model
    module = load_model_on_cpu(config, ModelInfo(config)).module  # type: ignore[attr-defined]
    assert {p.device.type for p in module.model.layers.parameters() if p.dim() == 2} == {"meta"}
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 12)
    with pytest.raises(
        ConfigError, match=r"too little memory: \d MiB .* Gemma2ForCausalLM unpacked"
    ):
        load_model_on_cpu(config, ModelInfo(config))


def test_a_later_layer_that_is_another_is_refused_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers before it are laid out by then: the model cannot run as it was any more."""
    load_module = GgufFile.load_module

    def change(source: GgufFile, *args: Any, **options: Any) -> Any:
        module = load_module(source, *args, **options)
        mlp = module.model.layers[1].mlp
        plain = mlp.forward
        mlp.forward = lambda x: 2 * plain(x)
        return module

    file = write(tmp_path, "llama", lambda name: "Q8_0")
    monkeypatch.setattr(GgufFile, "load_module", change)
    config = make_config(file, dtype="float32").model
    with pytest.raises(
        ConfigError, match=r"layer 1 .* but layers before it are: set model\.fused to False"
    ) as caught:
        load_model_on_cpu(config, ModelInfo(config))
    assert "\n" not in str(caught.value)
    config = make_config(file, dtype="float32", fused=False).model
    assert not load_model_on_cpu(config, ModelInfo(config)).is_compiled


def test_without_kernels_the_weights_are_unpacked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "llama", mixed)
    monkeypatch.setenv("AIOSERVE_KERNELS", "off")
    load_kernels.cache_clear()
    check(file, "float32", caplog, "are unpacked to float32")
    monkeypatch.undo()
    load_kernels.cache_clear()


def test_a_hybrid_has_the_weights_of_its_file(tmp_path: Path) -> None:
    """Layers with states are computed by `transformers`, which knows no blocks."""
    _, file = make_written(WRITTEN["lfm2"], tmp_path, kind="Q8_0")
    prompt, expected = [n % 256 for n in PROMPTS["b"][:30]], reference(file, "float32")

    async def reply() -> list[int]:
        config = make_config(file, dtype="float32", skip_tokenizer_init=True)
        async with AsyncEngine(config) as engine:
            return await tokens_of(engine, prompt, greedy(12))

    assert asyncio.run(reply()) == expected.tokens(prompt, 12)
