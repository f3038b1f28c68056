"""PEFT directories that are not served are refused in one line that says why."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aioserve.errors import ConfigError
from aioserve.features.lora.peft_directory import read_adapter, stored_parameters

KEY = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


def write(path: Path, tensors: dict[str, Any], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, **config}
    (path / "adapter_config.json").write_text(json.dumps(fields))
    return path


def factors(layer: int = 0, rank: int = 2) -> dict[str, Any]:
    shapes = {"A": (rank, 6), "B": (5, rank)}
    return {KEY.format(layer, side): torch.ones(shape) for side, shape in shapes.items()}


def test_the_scale_is_that_of_peft(tmp_path: Path) -> None:
    tensors = factors(0) | factors(1, rank=4) | factors(11)
    path = write(
        tmp_path,
        tensors,
        rank_pattern={"layers.1.self_attn.q_proj": 4},
        alpha_pattern={r"layers\.1\d\..*": 2},
    )
    modules = read_adapter(path).modules
    scales = {name.split(".")[2]: part.scale for name, part in modules.items()}
    assert scales == {"0": 8 / 2, "1": 8 / 4, "11": 2 / 2}
    assert read_adapter(path).rank == 4
    path = write(tmp_path, factors(rank=4), r=4, use_rslora=True)
    assert [part.scale for part in read_adapter(path).modules.values()] == [8 / 2]


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    digest = read_adapter(write(tmp_path, factors())).digest
    assert read_adapter(write(tmp_path, factors())).digest == digest
    assert read_adapter(write(tmp_path, factors(), lora_alpha=9)).digest != digest
    changed = {name: 2 * tensor for name, tensor in factors().items()}
    assert read_adapter(write(tmp_path, changed)).digest != digest


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"peft_type": "IA3"}, "adapters of type IA3 are not served: only LORA"),
        ({"use_dora": True}, "use_dora is set"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set"),
        ({"target_parameters": ["experts.gate_up"]}, "target_parameters is set"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"r": 3}, "are not of rank 3"),
        ({"r": "many"}, "cannot read"),
        ({"rank_pattern": {"(": 4}}, "no regular expression"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        read_adapter(write(tmp_path, factors(), **config))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_weights_that_are_no_adapters_are_refused(tmp_path: Path) -> None:
    first, second = factors()
    for tensors, why in (
        ({first: torch.ones(2, 6)}, "there is lora_A alone"),
        (factors() | {"model.norm.weight": torch.ones(6)}, "no weight of a LoRA adapter"),
        ({}, "it adapts nothing"),
        (factors() | {second: torch.full((5, 2), torch.nan)}, "numbers that are not finite"),
        (factors() | {second: torch.ones(2)}, "are not of rank 2"),
    ):
        with pytest.raises(ConfigError, match=why):
            read_adapter(write(tmp_path, tensors))
    with pytest.raises(ConfigError, match="rank 8: adapters of rank 1 to 4"):
        read_adapter(write(tmp_path, factors(rank=8), r=8), max_rank=4)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no adapter_config.json in adapter .*nowhere"):
        read_adapter(tmp_path / "nowhere")
    write(tmp_path, factors())
    weights = tmp_path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-3])
    with pytest.raises(ConfigError, match=f"cannot read adapter weights {weights}"):
        read_adapter(tmp_path)
    weights.write_bytes(whole)
    assert load_file(weights).keys() == factors().keys()
    weights.unlink()
    with pytest.raises(ConfigError, match=r"no adapter_model.safetensors in"):
        read_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        read_adapter(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_fifo_is_no_file_of_an_adapter(tmp_path: Path, name: str) -> None:
    write(tmp_path, factors())
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{tmp_path / name} is a FIFO, not a file"):
        read_adapter(tmp_path)
    assert stored_parameters(tmp_path) == (0 if "model" in name else 22)
