"""flashinfer's own Python takes what we give it, for every kind of attention; its kernels are not
run. Where flashinfer and tvm_ffi are installed: neither needs a card.

The kernels' place is taken by functions that note what reaches them, so everything before them is
flashinfer's: the code that it would compile, checks of plans and of tensors, and CUDA graphs'
buffers.
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flashinfer", reason="flashinfer is an extra for machines with a card")
pytest.importorskip("tvm_ffi", reason="flashinfer imports it")

HERE = Path(__file__).parent
BENCHMARKS = HERE.parents[1] / "benchmarks"


class Noted:
    """A module of kernels whose functions note their numbers and the shapes of their tensors."""

    def __init__(self, name: str, calls: list[Any]) -> None:
        self._name, self._calls = name, calls

    def __getattr__(self, function: str) -> Any:
        def note(*arguments: Any) -> tuple[int, int]:
            import torch

            told = [
                [str(a.dtype).removeprefix("torch."), *a.shape]
                if isinstance(a, torch.Tensor)
                else a
                for a in arguments
            ]
            self._calls.append([self._name, function, told])
            return 0, 0

        return note


def run_all() -> dict[str, Any]:
    """By kind: what reached the kernels in each part of the stages `kernels`, `attention` and
    `graphs`, or the error.
    """
    import card_stages
    import torch
    from card_pack import without_card

    from tests.runner.cuda.card_stand_ins import SMALL
    from tests.runner.cuda.fake_device import FakeDevice

    torch.set_num_threads(1)
    warnings.filterwarnings("error", ".*MLA", DeprecationWarning)
    calls: list[Any] = []
    without_card("9.0a", lambda described, build: Noted(described.name, calls))

    class Card(card_stages.Card):
        amounts = SMALL
        device = FakeDevice(eagerness=1)

    found = {}
    card = Card()
    for stage in ("kernels", "attention", "graphs"):
        for part in card_stages.STAGES[stage](card):
            calls.clear()
            error = None
            try:
                with torch.inference_mode():
                    part.work()
            except card_stages.WrongNumbersError:
                pass  # nothing was computed
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
            found[f"{stage}: {part.name}"] = {"error": error, "calls": list(calls)}
    return found


@cache
def found() -> dict[str, Any]:
    """In a process of its own, as flashinfer is changed for it."""
    code = "import json, sys; from tests.benchmarks.test_real_flashinfer import run_all\n"
    code += "json.dump(run_all(), open(sys.argv[1], 'w'), default=str)"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "found.json"
        paths = [str(BENCHMARKS), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "FLASHINFER_WORKSPACE_BASE": folder,
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        }
        command = [sys.executable, "-c", code, str(target)]
        subprocess.run(command, env=env, check=True, timeout=600)
        told: dict[str, Any] = json.loads(target.read_text())
    return told


def calls_of(part: str, function: str) -> list[tuple[str, list[Any]]]:
    return [(name, given) for name, own, given in found()[part]["calls"] if own == function]


def test_every_kind_is_planned_run_and_captured() -> None:
    assert {name: own["error"] for name, own in found().items() if own["error"]} == {}
    ran = {name for name, own in found().items() if not name.startswith("kernels")}
    for name in ran:
        functions = {function for _, function, _ in found()[name]["calls"]}
        assert functions & {"run", "paged_run"}, name


def test_sinks_and_the_scale_reach_the_kernels_that_the_cache_package_brings() -> None:
    part = "attention: decodes and prompts, 64/8 heads with sinks, of 64, window 100"
    runs = calls_of(part, "paged_run")
    assert len(runs) == 2  # decodes, prompts
    for name, given in runs:
        assert name.startswith("batch_prefill_with_attention_sink_kv_cache_dtype_q_bf16")
        assert "head_dim_qk_64" in name
        assert "use_swa_True" in name
        assert given[-2:] == [["float32", 64], 64**-0.5]
        assert 99 in given  # the window, which counts what is before a token


def test_heads_of_another_size_reach_kernels_for_wider_ones_with_their_own_scale() -> None:
    part = "attention: decodes and prompts, 32/32 heads of 96"
    decodes, prompts = calls_of(part, "run"), calls_of(part, "paged_run")
    assert decodes
    assert prompts
    for name, given in decodes + prompts:
        assert "head_dim_qk_128" in name
        assert 96**-0.5 in given
        assert any(own[2:] == [32, 128] for own in given if isinstance(own, list))


def test_latent_states_reach_the_kernel_as_views_of_one_cache() -> None:
    part = "attention: decodes and prompts, 20 heads on latent states of 512 and 64"
    runs = calls_of(part, "run")
    assert len(runs) == 2
    for name, given in runs:
        assert name.startswith("batch_mla_attention_dtype_q_bf16")
        tensors = [own for own in given if isinstance(own, list)]
        shapes = [own[1:] for own in tensors if len(own) == 4]
        (tokens, heads, size), turned, states, rest, out = shapes
        assert (heads, size, turned[1:]) == (32, 512, [32, 64])  # 20 heads, and 12 of zeros
        assert (states[2], rest[2]) == (512, 64)
        assert states[:2] == rest[:2]
        assert out == [tokens, 32, 512]
        assert 192**-0.5 in given
