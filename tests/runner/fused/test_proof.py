"""Models that are hard to compare: nothing that the proof meets ends a start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from aioserve.errors import ConfigError
from aioserve.kernels import load_kernels
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.bridge import ATTN_IMPLEMENTATION
from aioserve.runner.cpu.fused import WholeDecoder
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.runner.cpu.models import CpuPlace, load_model_on_cpu
from aioserve.runner.fused import fuse as fused
from aioserve.runner.fused.model import FusedModel
from aioserve.runner.loader import AnyModel, named_dtype, prepare_model
from aioserve.runner.served_model import ServedModel
from tests.models import make_model
from tests.runner.driver import BLOCK_SIZE, NUM_BLOCKS, Driver, make_config
from tests.runner.fused.test_fused import ROUNDING, compute, one_prompt, relative_error
from tests.variants import DTYPE, DTYPES

STEP = one_prompt(30, sampling=[0, 29])


def edited(path: Path, edit: Callable[[dict[str, Tensor]], object], **fields: Any) -> Path:
    """A tiny Llama whose weights `edit` changed in place."""
    make_model("llama", path, **fields)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        edit(dict(model.named_parameters()))
    model.save_pretrained(path)
    return path


def load(path: Path, **model: Any) -> ServedModel:
    config = make_config(path, **model).model
    return load_model_on_cpu(config, ModelInfo(config))


def nothing_added(weights: dict[str, Tensor]) -> None:
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        weights[f"model.layers.1.{name}.weight"].zero_()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_that_adds_nothing_is_fused(dtype: str, tmp_path: Path) -> None:
    path = edited(tmp_path, nothing_added)
    model = load(path, dtype=dtype)
    assert isinstance(model, FusedModel)
    expected = compute(load(path, dtype=dtype, fused=False), STEP)
    assert relative_error(compute(model, STEP), expected) < ROUNDING[dtype]


def test_a_head_of_zeros_is_fused(tmp_path: Path) -> None:
    path = edited(tmp_path, lambda weights: weights["lm_head.weight"].zero_())
    model = load(path)
    assert isinstance(model, FusedModel)
    assert not compute(model, STEP).any()


def test_a_wrong_layer_is_found_where_the_right_one_adds_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fuse_layer = edited(tmp_path, nothing_added), fused._fuse_layer

    def spoil(parts: Any, ops: Any, ranks: None) -> Any:
        from dataclasses import replace

        layer = fuse_layer(parts, ops, ranks)
        mlp, more = layer.mlp, 1e-3 if DTYPE == "float32" else 1
        return replace(layer, mlp=replace(mlp, down=lambda x: mlp.down(x) + more))

    monkeypatch.setattr(fused, "_fuse_layer", lambda parts, ops, ranks: (
        spoil if parts.attention.index == 1 else fuse_layer)(parts, ops, ranks))  # fmt: skip
    caplog.set_level("INFO")
    assert isinstance(load(path), AnyModel)
    assert "layer 1 is not that of Llama" in caplog.text


NOT_NUMBERS = {
    "a NaN in a layer": ("model.layers.1.mlp.down_proj.weight", float("nan")),
    "infinity in a layer": ("model.layers.1.mlp.down_proj.weight", float("inf")),
    "a NaN in the embedding": ("model.embed_tokens.weight", float("nan")),
    "a NaN in a norm": ("model.layers.0.input_layernorm.weight", float("nan")),
    "a NaN in the head": ("lm_head.weight", float("nan")),
}


@pytest.mark.parametrize("case", NOT_NUMBERS)
def test_weights_that_are_not_numbers_are_served_unfused_and_the_log_says_why(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, value = NOT_NUMBERS[case]
    path = edited(tmp_path, lambda weights: weights[name].fill_(value))
    caplog.set_level("INFO")
    config = make_config(path)
    runner = load_on_cpu(config, ModelInfo(config.model))
    (line,) = [
        r.message
        for r in caplog.records
        if r.name == "aioserve.runner.loader" and r.levelname == "INFO"
    ]
    assert line.startswith("LlamaForCausalLM runs as transformers wrote it, not fused: ")
    driver = Driver(runner, NUM_BLOCKS, BLOCK_SIZE)
    driver.add("a", [1, 2, 3])
    assert list(driver.step().failed) == ["a"]
    assert f"1 of the 30 weights of LlamaForCausalLM hold NaN or infinity: {name}. " in caplog.text
    runner.close()


class Moody(nn.SiLU):
    """Raises where its input has this number of dimensions; hidden layers have three."""

    dimensions = 0

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == self.dimensions:
            raise ValueError("not today")
        return super().forward(x)


@pytest.mark.parametrize("when", ["its activation is looked at", "the proof runs it"])
def test_a_module_that_raises_is_served_unfused_and_the_log_says_why(
    when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(make_model("llama", tmp_path)).model
    module = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=ATTN_IMPLEMENTATION, dtype=named_dtype(DTYPE)
    ).eval()

    def fail_on_long_input(_: nn.Module, args: Any) -> None:
        if args[0].shape[1] > 8:  # more than what finds out about its attention
            raise ValueError("not today")

    hook = None
    if when == "the proof runs it":
        hook = module.model.layers[1].register_forward_pre_hook(fail_on_long_input)
    else:
        activation = module.model.layers[1].mlp.act_fn = Moody()
        activation.dimensions = 1
    caplog.set_level("INFO")
    model = prepare_model(module, config, ModelInfo(config), CpuPlace())
    assert isinstance(model, AnyModel)
    assert "not fused: ValueError: not today" in caplog.text
    if hook is not None:
        hook.remove()
    assert torch.equal(compute(model, STEP), compute(load(tmp_path, fused=False), STEP))


def test_a_compiled_loop_that_raises_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path)
    expected = load(tmp_path, dtype="bfloat16")
    assert isinstance(expected, FusedModel)
    if not isinstance(expected.decoder, WholeDecoder):
        pytest.skip("the kernels of this CPU have no compiled loop")

    def fail(*_: object) -> None:
        raise ValueError("not today")

    monkeypatch.setattr(WholeDecoder, "forward", fail)
    model = load(tmp_path, dtype="bfloat16")
    assert isinstance(model, FusedModel)
    assert "not today" in caplog.text
    monkeypatch.undo()
    assert torch.equal(compute(model, STEP), compute(expected, STEP))


def test_a_wrong_setting_still_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path)
    monkeypatch.setenv("AIOSERVE_KERNELS", "mmx")
    load_kernels.cache_clear()
    with pytest.raises(ConfigError, match="not 'mmx'"):
        load(tmp_path)
