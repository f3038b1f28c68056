"""What happens without each private name of `test_private_names`: it is taken away, and tried."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed

from aioserve.errors import ConfigError
from aioserve.features.multimodal.prompt import ImageProcessor
from aioserve.lab.simulation.run import VirtualClockEventLoop
from aioserve.model_source.info import ModelInfo
from aioserve.runner import loader
from aioserve.runner.cpu import onednn
from aioserve.runner.cpu.models import load_model_on_cpu
from aioserve.runner.fused import recognize
from aioserve.runner.loader import AnyModel
from aioserve.runner.models.architecture import check_architecture
from aioserve.runner.models.row_by_row import RowByRowModel
from aioserve.runner.served_model import ServedModel
from tests.models import make_model
from tests.runner.driver import make_config
from tests.test_private_names import TABLE
from tests.variants import needs_kernels

Test = TypeVar("Test", bound=Callable[..., object])

tried: set[tuple[str, str]] = set()


def without(module: str, *names: str) -> Callable[[Test], Test]:
    """Marks a test that takes these names away from what `module` reads."""
    tried.update((module, name) for name in names)
    return lambda test: test


def test_every_row_is_tried() -> None:
    assert tried == {(row.module, row.name) for row in TABLE}


@without("aioserve.features.multimodal.prompt", "_get_num_multimodal_tokens")
def test_an_image_counts_as_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioserve.features.multimodal.prompt.size_of", lambda image, name: (64, 64))
    processor: Any = object.__new__(ImageProcessor)
    processor._processor = SimpleNamespace()
    processor._family = SimpleNamespace(beside=False)
    assert processor.least_tokens(["an image", "another one"]) == 2


@without("aioserve.lab.simulation.run", "_ready", "_scheduled")
@pytest.mark.parametrize("name", ["_ready", "_scheduled"])
def test_a_simulation_fails_in_its_first_step(name: str) -> None:
    loop = VirtualClockEventLoop()
    try:
        taken = getattr(loop, name)
        delattr(loop, name)
        with pytest.raises(AttributeError, match=name):
            loop.jump_to(1.0)
        setattr(loop, name, taken)
        assert loop.jump_to(1.0)
    finally:
        loop.close()


@without("aioserve.runner.models.architecture", "_is_stateful")
def test_a_model_with_states_of_its_own_is_refused_for_another_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig, PreTrainedModel
    from transformers.models.recurrent_gemma import modeling_recurrent_gemma

    AutoConfig.for_model("recurrent_gemma").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="states in a way of their own"):
        check_architecture(info_of(tmp_path))
    for owner in (modeling_recurrent_gemma.RecurrentGemmaPreTrainedModel, PreTrainedModel):
        monkeypatch.delattr(owner, "_is_stateful")
    with pytest.raises(ConfigError, match="layers of type linear_attention are not served"):
        check_architecture(info_of(tmp_path))


@without("aioserve.runner.cpu.onednn", "_linear_pointwise", "_reorder_linear_weight")
@pytest.mark.parametrize("name", ["_linear_pointwise", "_reorder_linear_weight"])
def test_weights_are_not_packed_and_the_log_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"_linear_pointwise", "_reorder_linear_weight"} - {name}
    there = SimpleNamespace(**{each: getattr(torch.ops.mkldnn, each) for each in names})
    monkeypatch.setattr(torch.ops, "mkldnn", there)
    onednn._can_pack.cache_clear()
    caplog.set_level("INFO")
    try:
        assert isinstance(onednn.pack_linear(torch.eye(16), None), onednn.PlainLinear)
    finally:
        onednn._can_pack.cache_clear()
    (line,) = caplog.messages
    assert "weights are not packed" in line
    assert name in line


@needs_kernels
@without("aioserve.runner.fused.recognize", "_apply_gate")
def test_a_model_with_experts_runs_as_transformers_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    find = recognize.find_experts

    def find_without(mlp: Any) -> Any:
        with monkeypatch.context() as here:  # transformers itself calls it by this name
            here.delattr(MixtralExperts, "_apply_gate")
            return find(mlp)

    make_model("mixtral", tmp_path)
    monkeypatch.setattr(recognize, "find_experts", find_without)
    caplog.set_level("INFO")
    assert isinstance(load(tmp_path), AnyModel)
    assert "not fused: MixtralExperts has no _apply_gate" in caplog.text


@without("aioserve.runner.models.attention_probe", "_attn_implementation")
def test_a_model_is_served_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PretrainedConfig

    probe = loader.probe_attention

    def probe_without(*args: Any, **options: Any) -> Any:
        with monkeypatch.context() as here:  # transformers itself reads it by this name
            here.delattr(PretrainedConfig, "_attn_implementation")
            return probe(*args, **options)

    make_model("llama", tmp_path)
    monkeypatch.setattr(loader, "probe_attention", probe_without)
    assert isinstance(load(tmp_path), RowByRowModel)


def info_of(path: Path) -> ModelInfo:
    return ModelInfo(make_config(path).model)


def load(path: Path) -> ServedModel:
    info = info_of(path)
    return load_model_on_cpu(info.config, info)
