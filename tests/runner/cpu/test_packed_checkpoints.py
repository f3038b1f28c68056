"""Checkpoints whose weights were quantized elsewhere, against `transformers` on what they mean."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from aioserve.gpu.cuda.fused import CudaPlace
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.runner.loader import load_model
from tests.greedy import GreedyReference
from tests.models import make_model
from tests.packed_checkpoints import (
    Writer,
    awq,
    compressed_integers,
    float8,
    gptq,
    mxfp4,
    write_checkpoint,
)
from tests.runner.driver import Driver, make_config
from tests.variants import needs_kernels

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}
PROMPTS = {"a": [7], "b": [5, 80, 7, 511, 2] * 4}
PACKED = "multiplied as they are stored"


def groups(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


class Case(NamedTuple):
    config: dict[str, Any]
    write: Writer
    said: str


CASES = {
    "gptq 4 bits, zeros": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False},
        gptq(4, 128),
        f"uint4/128, {PACKED}",
    ),
    "gptq 4 bits, symmetric": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
        gptq(4, 32, is_symmetric=True),
        f" int4/32, {PACKED}",
    ),
    "gptq 8 bits, second layout": Case(
        {"quant_method": "gptq", "bits": 8, "group_size": 64, "checkpoint_format": "gptq_v2"},
        gptq(8, 64, zeros_are_less=0),
        f"uint8/64, {PACKED}",
    ),
    "gptq, inputs in another order": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
        gptq(4, 64, is_ordered=True),
        "14 of its 14 quantized weights (gptq) are unpacked to float32",
    ),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"},
        awq(64),
        f"uint4/64, {PACKED}",
    ),
    "compressed-tensors 4 bits": Case(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups(num_bits=4, type="int", strategy="group", group_size=128),
        },
        compressed_integers(4, 128),
        f" int4/128, {PACKED}",
    ),
    "compressed-tensors 4 bits, zeros": Case(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups(num_bits=4, type="int", symmetric=False, group_size=32),
        },
        compressed_integers(4, 32, is_symmetric=False),
        f"uint4/32, {PACKED}",
    ),
    "compressed-tensors 8 bits by channel": Case(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": groups(num_bits=8, type="int", strategy="channel"),
        },
        compressed_integers(8, None),
        f"int8/256, int8/384, {PACKED}",
    ),
    "compressed-tensors int8": Case(
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": groups(num_bits=8, type="int", strategy="channel"),
        },
        compressed_integers(8, None, is_packed=False),
        f"int8/256, int8/384, {PACKED}",
    ),
    "compressed-tensors fp8 by channel": Case(
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": groups(num_bits=8, type="float", strategy="channel"),
        },
        float8((1, 1 << 20), "weight_scale"),
        "(compressed-tensors) are unpacked to float32",
    ),
    "fp8 in blocks": Case(
        {"quant_method": "fp8", "weight_block_size": [128, 96]},
        float8((128, 96), "weight_scale_inv"),
        "14 of its 14 quantized weights (fp8) are unpacked to float32",
    ),
    "fp8, one scale": Case(
        {"quant_method": "fp8"},
        float8(None, "weight_scale"),
        "14 of its 14 quantized weights (fp8) are unpacked to float32",
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), **SIZES)


def check(path: Path, said: str, caplog: Any) -> None:
    config = make_config(path, dtype="float32")
    with caplog.at_level("INFO"):
        runner = load_on_cpu(config, ModelInfo(config.model))
    try:
        assert said in caplog.text
        driver = Driver(runner, 64, 8)
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        driver.step({"a": 1, "b": 20})
        for _ in range(8):
            driver.step()
        reference = GreedyReference(path / "unpacked", torch.float32)
        for name, prompt in PROMPTS.items():
            output = driver.sequences[name].output
            assert len(output) > 8
            assert output == reference.tokens(prompt, len(output)), name
    finally:
        runner.close()


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_what_is_meant(
    case: str, llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, write, said = CASES[case]
    check(write_checkpoint(llama, tmp_path / "m", config, write), said, caplog)


def test_experts_of_mxfp4_are_unpacked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In gpt-oss, which other quantized types do not come in."""
    whole = make_model("gpt_oss", tmp_path / "whole", **SIZES)
    path = write_checkpoint(
        whole, tmp_path / "m", {"quant_method": "mxfp4"}, mxfp4, pattern="*.experts.*_proj"
    )
    check(path, "4 of its 4 quantized weights (mxfp4) are unpacked to float32", caplog)


@needs_kernels
def test_experts_that_transformers_puts_together_are_unpacked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is stored by itself; attention and experts are all quantized."""
    whole = make_model("mixtral", tmp_path / "whole")
    config, write, _ = CASES["gptq 4 bits, symmetric"]
    path = write_checkpoint(whole, tmp_path / "m", config, write, "*.layers.*.[wqkvo]*.weight")
    check(path, "36 of its 48 quantized weights (gptq) are unpacked to float32", caplog)
    assert "MixtralForCausalLM, fused: 0 MB of weights, int4/32, multiplied as" in caplog.text


@torch.inference_mode()
def test_on_a_card_they_are_unpacked(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On a stand-in for one: the same logits as of the numbers that are meant, to the bit."""
    config, write, _ = CASES["gptq 4 bits, zeros"]
    path = write_checkpoint(llama, tmp_path / "m", config, write)
    place = CudaPlace(torch.device("cpu"), has_triton=False)
    step = StepInputs(
        req_ids=["a"],
        rows=np.arange(1),
        input_ids=np.arange(5),
        positions=np.arange(5),
        slot_mapping=np.arange(5),
        query_start_loc=np.array([0, 5]),
        seq_lens=np.array([5]),
        block_table=np.zeros((1, 1), dtype=np.int32),
        sampling=np.arange(1),
        logits_indices=np.array([4]),
    )
    logits = []
    for directory in (path, path / "unpacked"):
        settings = make_config(directory, dtype="float32").model
        with caplog.at_level("INFO"):
            model = load_model(settings, ModelInfo(settings), place)
        logits.append(model.forward(*place.begin_alone(model.kv_cache_spec, 1, 16, step)))
    assert "14 of its 14 quantized weights (gptq) are unpacked to float32" in caplog.text
    assert torch.equal(*logits)
