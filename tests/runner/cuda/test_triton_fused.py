"""The Triton kernels of fused layers, in the interpreter: layer by layer, and token for token."""

import json
import os
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from aioserve.gpu.cuda import sampler
from aioserve.gpu.cuda.attention import TorchDeviceAttention
from aioserve.gpu.cuda.executor import StepExecutor
from aioserve.gpu.cuda.fused import CudaPlace, TritonOps
from aioserve.gpu.cuda.plan import Layout, Limits
from aioserve.gpu.cuda.sampler import DeviceSampler
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.cpu.models import load_model_on_cpu
from aioserve.runner.fused.model import FusedModel
from aioserve.runner.load_plan import BatchParts
from aioserve.runner.loader import load_model
from aioserve.runner.served_model import ServedModel
from aioserve.scheduler.output import SchedulerOutput
from tests.models import VOCAB_SIZE, make_model
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.driver import Driver, make_config

KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"},
    "llama, odd sizes": {"hidden_size": 60, "intermediate_size": 70, "head_dim": 12},
}

# A process for all of them, in which Triton interprets: half a minute.
pytestmark = pytest.mark.slow

NARROW = "narrow types"


class OneByOne:
    """An executor as a runner without overlap, for the driver."""

    def __init__(self, model: ServedModel) -> None:
        limits = Limits(num_rows=8, num_tokens=128, num_row_pages=16, page_size=8, num_pages=64)
        layout, device = Layout(limits), FakeDevice(eagerness=1)
        self.executor = StepExecutor(
            device,
            model,
            TorchDeviceAttention(model.kv_cache_spec, limits, device.torch_device),
            DeviceSampler(device, limits.num_rows, limits.num_samples, VOCAB_SIZE, sampler.draw),
            layout,
            torch.zeros(layout.size, dtype=torch.int32),
            BatchParts(model, limits.num_rows, 127, limits.page_size, VOCAB_SIZE),
        )

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        launched = self.executor.launch(step)
        assert launched is not None
        return self.executor.finish(launched)


def generate(model: ServedModel, num_tokens: int) -> list[list[int]]:
    """Two requests, one of them in chunks."""
    driver = Driver(OneByOne(model), 64, 8)  # type: ignore[arg-type]
    driver.add("a", list(range(40, 61)))
    driver.add("b", [7, 3, 200])
    driver.step({"a": 11, "b": 3})
    for _ in range(num_tokens):
        driver.step()
    return [driver.sequences[name].output for name in "ab"]


def check_kind(kind: str, path: str) -> None:
    """In the interpreter: recognized, proved layer by layer, and the same tokens."""
    directory = make_model(kind.split(",")[0], Path(path), **KINDS[kind])
    config = make_config(directory).model
    place = CudaPlace(torch.device("cpu"), has_triton=True)
    fused = load_model(config, ModelInfo(config), place)
    assert isinstance(fused, FusedModel)
    assert isinstance(fused.decoder.ops, TritonOps)
    plain_config = make_config(directory, fused=False).model
    plain = load_model_on_cpu(plain_config, ModelInfo(plain_config))
    assert generate(fused, 4) == generate(plain, 4)


def check_bfloat16_and_fp8() -> None:
    """Types narrower than what is computed in; a cache of fp8 saturates.

    The interpreter cuts where the hardware rounds: up to one unit in the last place, which is
    2^-7 of a bfloat16 and 2^-3 of an fp8. What is added and normed may be two of them off.
    """
    from aioserve.gpu.cuda import triton_kernels

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 96, generator=generator).bfloat16()
    residual, weight = torch.randn(5, 96).bfloat16(), torch.rand(96).bfloat16()
    out, summed = torch.empty_like(x), residual + x
    triton_kernels.add_rms_norm(x, residual, weight, 1e-6, out)
    torch.testing.assert_close(residual, summed, rtol=2**-7, atol=0)
    expected = F.rms_norm(residual.float(), (96,), weight.float(), 1e-6).bfloat16()
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=0)

    qkv = 300 * torch.randn(3, 4 * 16, generator=generator)
    qkv[0, 50], qkv[1, 60] = float("inf"), float("nan")
    keys, values = torch.zeros(2, 9, 1, 24, dtype=torch.float8_e4m3fn)  # wider than heads
    angles = torch.cat([torch.ones(1, 8), torch.zeros(1, 8)], dim=1)  # turn nothing
    before = qkv.clone()
    slots, positions = torch.tensor([4, 0, 8]), torch.zeros(3, dtype=torch.int64)
    triton_kernels.rope_store(qkv, angles, positions, slots, keys, values, 2, None, 0.0)
    stored = before.nan_to_num(0, 0, 0).clamp(-448, 448)
    assert (stored.abs() == 448).sum() > 5
    for cache, part in ((keys, stored[:, 32:48]), (values, stored[:, 48:])):
        found, more = cache[slots, 0].float().split((16, 8), dim=-1)
        assert not more.any()
        torch.testing.assert_close(found, part, rtol=2**-3, atol=0)
        saturated = part.abs() == 448
        assert torch.equal(found[saturated], part[saturated])
    assert torch.equal(qkv[:, :32], before[:, :32])


def report_all(directory: str) -> None:
    """Run every check and print, as the last line, the errors by what was checked."""
    torch.set_num_threads(1)
    checks = {kind: partial(check_kind, kind, f"{directory}/{kind}") for kind in KINDS}
    errors = {}
    for name, check in {**checks, NARROW: check_bfloat16_and_fp8}.items():
        try:
            check()
        except Exception:
            errors[name] = traceback.format_exc()
    sys.stdout.write("\n" + json.dumps(errors))


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of all checks, in one process: to import everything takes longer than any of them."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    code = (
        "import sys; sys.path[:0] = ['tests/runner/cuda', 'tests/runner']\n"
        f"from test_triton_fused import *; report_all({str(tmp_path_factory.mktemp('kinds'))!r})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_fused_layers_by_triton_are_the_modules_of_transformers(errors: dict[str, str]) -> None:
    assert {kind: error for kind, error in errors.items() if kind in KINDS} == {}


def test_kernels_serve_narrow_types_and_saturate(errors: dict[str, str]) -> None:
    assert NARROW not in errors, errors[NARROW]
