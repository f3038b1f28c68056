"""A quantized checkpoint that cannot be read is refused in one line that says what and where.

What the readers make of good ones is tests/runner/cpu/test_packed_checkpoints.py.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.features.quantized import from_codes
from aioserve.model_source.info import ModelInfo
from tests.models import make_model
from tests.packed_checkpoints import (
    Tensors,
    Writer,
    awq,
    compressed_integers,
    float8,
    gptq,
    mxfp4,
    write_checkpoint,
)

Change = Callable[[Tensors], None]

GPTQ = {"quant_method": "gptq", "bits": 4}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
COMPRESSED["config_groups"] = {"group_0": {"weights": {"num_bits": 4}}}
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1)


def load(path: Path) -> Any:
    source = ModelInfo(ModelConfig(model=str(path))).source
    source.num_bytes(4, keeps_blocks=True)
    cpu = torch.device("cpu")
    return source.load_module(torch.float32, cpu, "eager", keeps_blocks=True)


def without(name: str) -> Change:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def with_rows(name: str, count: int) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:count].contiguous()

    return change


def as_type(name: str, dtype: torch.dtype) -> Change:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(dtype)

    return change


def a_strange_group(tensors: Tensors) -> None:
    tensors[f"{Q_PROJ}.g_idx"][5] = 7


@pytest.mark.parametrize(
    ("config", "write", "change", "reason"),
    [
        (
            {"quant_method": "bitsandbytes"},
            gptq(4, 32),
            None,
            "has quant_method 'bitsandbytes'; read are gptq, awq, compressed-tensors, fp8, mxfp4",
        ),
        ({**GPTQ, "bits": 3}, gptq(4, 32), None, "it is GPTQ of 3 bits"),
        ({**GPTQ, "checkpoint_format": "marlin"}, gptq(4, 32), None, "in the layout marlin"),
        (GPTQ, gptq(4, 32), without(f"{Q_PROJ}.scales"), f"no tensor {Q_PROJ}.scales"),
        (
            GPTQ,
            gptq(4, 32),
            with_rows(f"{Q_PROJ}.qzeros", 1),
            f"tensor {Q_PROJ}.qzeros has the shape (1, 8), expected is (2, 8)",
        ),
        (
            GPTQ,
            gptq(4, 32),
            as_type(f"{Q_PROJ}.qweight", torch.int64),
            f"tensor {Q_PROJ}.qweight is of type I64, expected is I32",
        ),
        (
            GPTQ,
            gptq(4, 32),
            with_rows(f"{Q_PROJ}.qweight", 7),
            f"tensor {Q_PROJ}.g_idx has the shape (64,), expected is (56)",
        ),
        (GPTQ, gptq(4, 32), without(f"{Q_PROJ}.qweight"), "weights of LlamaForCausalLM are not in"),
        (GPTQ, gptq(4, 32), a_strange_group, "an input is of group 7 of 2"),
        (GPTQ, float8(None, "weight_scale"), None, "says gptq, but no tensor is stored so"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, awq(32), None, "version gemv"),
        (
            {**COMPRESSED, "format": "nvfp4-pack-quantized"},
            compressed_integers(4, 32),
            None,
            "it is compressed-tensors with nvfp4-pack-quantized; read are",
        ),
        (
            {**COMPRESSED, "transform_config": {"config_groups": {}}},
            compressed_integers(4, 32),
            None,
            "with transform_config",
        ),
        (
            COMPRESSED,
            compressed_integers(4, 32),
            with_rows(f"{Q_PROJ}.weight_scale", 9),
            f"tensor {Q_PROJ}.weight_scale has the shape (9, 2), expected is (64, any)",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [32, 32]},
            float8((32, 32), "weight_scale_inv"),
            with_rows(f"{Q_PROJ}.weight_scale_inv", 1),
            f"tensor {Q_PROJ}.weight_scale_inv has the shape (1, 2)",
        ),
        (
            {"quant_method": "fp8"},
            float8(None, "weight_scale"),
            without(f"{Q_PROJ}.weight_scale"),
            f"tensor {Q_PROJ}.weight is of type F8_E4M3, without scales",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    config: dict[str, Any],
    write: Writer,
    change: Change | None,
    reason: str,
    llama: Path,
    tmp_path: Path,
) -> None:
    path = write_checkpoint(llama, tmp_path / "m", config, write, change=change)
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert reason in message
    assert str(path) in message
    assert "\n" not in message


def test_experts_without_their_scales_are_refused(tmp_path: Path) -> None:
    whole = make_model("gpt_oss", tmp_path / "whole", num_hidden_layers=1)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    path = write_checkpoint(
        *(whole, tmp_path / "m", {"quant_method": "mxfp4"}, mxfp4, "*.experts.*_proj"),
        change=without(name),
    )
    with pytest.raises(ConfigError, match=f"there is no tensor {name}"):
        load(path)


def test_it_is_not_rounded_again(llama: Path, tmp_path: Path) -> None:
    path = write_checkpoint(llama, tmp_path / "m", GPTQ, gptq(4, 32))
    with pytest.raises(ConfigError, match=r"model\.quantization is 'int8', but .*gptq"):
        ModelInfo(ModelConfig(model=str(path), quantization="int8"))


@pytest.mark.parametrize(
    ("bits", "scale", "zero", "kind"),
    [
        (4, 0.5, 8, "int4/64"),
        (4, 0.5, 0, "uint4/64"),
        (4, 0.5, 16, "uint4/64"),
        (8, 0.5, 255, "uint8/64"),
        (8, 0.5, 0, None),  # no byte is 128
        (4, 1e-8, 8, None),  # no float16
        (4, 1e6, 8, None),
    ],
)
def test_codes_are_kept_where_that_is_exact(
    bits: int, scale: float, zero: int, kind: str | None
) -> None:
    codes = torch.arange(8 * 128).view(8, 128).remainder(1 << bits).to(torch.uint8)
    scales, zeros = torch.full((8, 2), scale), torch.full((8, 2), zero)
    found = from_codes(bits, codes, scales, zeros)
    assert (found and found.kind) == kind
    if found is not None:
        assert torch.equal(found.dequantize(torch.float32), (codes - float(zero)) * scale)
