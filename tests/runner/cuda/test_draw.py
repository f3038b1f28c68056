"""Device draws are the CPU's: the same noise bit for bit, the same limits, the same tokens.

Triton runs in its interpreter, in a process of its own: it is switched on at import.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from aioserve.gpu.cuda import sampler
from aioserve.gpu.cuda.sampler import DrawColumns
from aioserve.runner.batch import sampling_columns
from aioserve.runner.batch.sampling_columns import SamplingInputs
from aioserve.runner.cpu.sampler import sample

INTERPRETER = {**os.environ, "TRITON_INTERPRET": "1"}


def random_columns(seed: int, num_rows: int) -> SamplingInputs:
    rng = np.random.default_rng(seed)

    def pick(*choices: float) -> np.ndarray:
        return rng.choice(np.array(choices), num_rows)

    return replace(
        SamplingInputs.neutral(num_rows),
        num_tokens=rng.integers(1, 100_000, num_rows),
        temperature=pick(0, 0.01, 0.7, 1, 3).astype(np.float32),
        top_k=pick(0, 0, 1, 2, 40, 100_000).astype(np.int64),
        top_p=pick(1, 1, 0.001, 0.5, 0.95).astype(np.float32),
        min_p=pick(0, 0, 0.1, 1).astype(np.float32),
        seeds=rng.integers(0, 1 << 32, (num_rows, 2), dtype=np.uint32),
    )


def on_device(inputs: SamplingInputs) -> DrawColumns:
    keys = sampling_columns.row_keys(inputs.seeds, inputs.num_tokens).view(np.int32)
    with np.errstate(divide="ignore"):
        floor = np.log(inputs.min_p)
    return DrawColumns(
        temperature=torch.from_numpy(inputs.temperature),
        top_k=torch.from_numpy(inputs.top_k.astype(np.int32)),
        top_p=torch.from_numpy(inputs.top_p),
        min_p_floor=torch.from_numpy(floor),
        keys=torch.from_numpy(np.ascontiguousarray(keys.T)),
        has_top_k=bool((inputs.top_k > 0).any()),
        has_top_p=bool((inputs.top_p < 1).any()),
    )


def random_logits(seed: int, num_rows: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, size, generator=generator) * 4
    logits[:, size // 2] = logits[:, size // 3]  # equals, also among the most likely
    logits[0, size // 4 :] = float("-inf")  # as a mask leaves them
    return logits.to(dtype)


def check_noise(uniforms: Callable[[Tensor, int], Tensor]) -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 1 << 32, (50, 2), dtype=np.uint32)
    expected = sampling_columns.uniform(
        sampling_columns.hash_tokens(keys, np.arange(5000, dtype=np.uint32))
    )
    found = uniforms(torch.from_numpy(np.ascontiguousarray(keys.T).view(np.int32)), 5000).numpy()
    assert (found.view(np.uint32) == expected.view(np.uint32)).all()


def check_tokens(draw: Callable[[Tensor, DrawColumns], Tensor], num_seeds: int) -> None:
    drawn = set()
    for seed in range(num_seeds):
        for dtype in (torch.float32, torch.bfloat16):  # in bfloat16 there are many equals
            inputs = random_columns(seed, 24)
            logits = random_logits(seed, 24, 4500 + seed, dtype)
            expected = sample(logits, inputs).token_ids.tolist()
            assert draw(logits, on_device(inputs)).tolist() == expected
            drawn.update(expected)
    assert len(drawn) > num_seeds


def check_limits(
    limits: Callable[[Tensor, Tensor, DrawColumns], Tensor], dtype: torch.dtype
) -> None:
    """Keep what top-k keeps, equals together, and top-p up to the rounding of float32 sums."""
    inputs = random_columns(3, 24)
    inputs.min_p[:] = 0
    logits, columns = random_logits(3, 24, 9000, dtype), on_device(inputs)
    highest = logits.amax(dim=-1).float()
    found = limits(logits, highest, columns)
    heat = torch.where(columns.temperature > 0, columns.temperature, 1.0)
    scaled = (logits.float() - highest[:, None]) / heat[:, None]
    whole = torch.ones_like(columns.top_p)
    of_top_k = sampler.lowest_kept(scaled, columns.top_k, whole)
    for row in np.flatnonzero(inputs.temperature > 0):
        k, p, values = int(columns.top_k[row]), float(columns.top_p[row]), scaled[row].double()
        if p == 1:
            finite = values[values > float("-inf")]
            assert ((finite >= found[row]) == (finite >= of_top_k[row])).all()
            assert k or found[row] == float("-inf")
        else:
            mass = values.exp() * (values >= of_top_k[row])
            share = p * mass.sum()
            assert mass[values > found[row]].sum() < share * (1 + 1e-5)
            assert mass[values >= found[row]].sum() > share * (1 - 1e-5)
            assert (values == found[row]).any()


def check_distribution(draw: Callable[[Tensor, DrawColumns], Tensor], num_rows: int) -> None:
    """Draws of many rows of the same logits have the frequencies of what the limits keep."""
    logits = torch.linspace(2, -2, 40)
    rng = np.random.default_rng(1)
    inputs = random_columns(0, num_rows)
    inputs.temperature[:], inputs.top_k[:], inputs.top_p[:], inputs.min_p[:] = 0.8, 12, 0.9, 0
    inputs.seeds[:] = rng.integers(0, 1 << 32, (num_rows, 2), dtype=np.uint32)
    drawn = draw(logits.repeat(num_rows, 1), on_device(inputs))
    shares = (logits / 0.8).double().softmax(0)
    shares[12:] = 0
    shares /= shares.sum()
    shares[(shares.cumsum(0) - shares) >= 0.9] = 0
    expected = shares / shares.sum() * num_rows
    counts = torch.bincount(drawn, minlength=40)
    kept = expected > 0
    assert not counts[~kept].any()
    chi_square = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_draws_in_torch_have_the_frequencies_of_what_the_limits_keep() -> None:
    check_distribution(sampler.draw, 20_000)


def test_noise_in_torch_is_that_of_numpy_bit_for_bit() -> None:
    check_noise(sampler.uniforms)


def test_draws_in_torch_are_those_of_the_cpu_sampler() -> None:
    check_tokens(sampler.draw, num_seeds=20)


def test_greedy_rows_alone_and_unlimited_rows_alone_are_the_cpu_samplers_too() -> None:
    for temperature in (0, 0.8):
        inputs = random_columns(5, 8)
        inputs.temperature[:] = temperature
        inputs.top_k[:], inputs.top_p[:] = 0, 1
        logits = random_logits(1, 8, 300, torch.float32)
        columns = on_device(inputs)
        assert not columns.has_top_k
        assert not columns.has_top_p
        assert sampler.draw(logits, columns).tolist() == sample(logits, inputs).token_ids.tolist()


@pytest.mark.slow
def test_triton_kernels_do_the_same_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    code = (
        "from tests.runner.cuda.test_draw import *\n"
        "from aioserve.gpu.cuda import triton_kernels as t\n"
        "check_noise(t.uniforms); check_tokens(t.draw, 1); check_distribution(t.draw, 60)\n"
        "check_limits(t.limits, torch.float32); check_limits(t.limits, torch.bfloat16)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], env=INTERPRETER, capture_output=True, text=True, timeout=900
    )
    assert result.returncode == 0, result.stderr
