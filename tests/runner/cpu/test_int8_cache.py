"""K and V as int8: the same codes in every variant and in plain torch, and close to what they
stand for.

A code is off by half a step at most, a step is 1/127 of the largest number of a row: of normal
numbers in heads of 64 about 1% of their size.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from aioserve.config import CacheConfig, EngineConfig
from aioserve.errors import ConfigError
from aioserve.kernels import Kernels, load_kernels
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams
from aioserve.runner.attention.backend import (
    AttentionOptions,
    ImageEnds,
    KVCacheSpec,
    LayerSpec,
    StepInputs,
)
from aioserve.runner.cpu.attention import CompiledAttention
from aioserve.runner.cpu.kv_memory import AttentionBackend
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.runner.cpu.torch_attention import TorchPagedAttention
from tests.models import VOCAB_SIZE, make_model
from tests.runner.driver import Driver, make_config
from tests.variants import EVERY_VARIANT

MakeDriver = Callable[..., Driver]
LENGTHS = [1, 20, 70, 530]  # an item of one tile, of several, of several pieces
PLAIN = AttentionOptions(0.125)
ALL_OPTIONS = AttentionOptions(0.125, 100, 3.0, torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -2.0]))
# Of numbers about 1. In bfloat16 and float16 the result is rounded, weights in bfloat16 as well.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def rows_of(lengths: list[int], new: list[int], block_size: int) -> StepInputs:
    """The last `new` tokens of each row, over shuffled blocks."""
    width = -(-max(lengths) // block_size)
    blocks = np.random.default_rng(0).permutation(len(lengths) * width).astype(np.int32)
    table = blocks.reshape(len(lengths), width)
    positions = [np.arange(end - count, end) for end, count in zip(lengths, new, strict=True)]
    slots = [
        row[own // block_size].astype(np.int64) * block_size + own % block_size
        for row, own in zip(table, positions, strict=True)
    ]
    starts = np.cumsum([0, *new])
    return StepInputs(
        req_ids=[str(row) for row in range(len(lengths))],
        rows=np.arange(len(lengths)),
        input_ids=np.arange(starts[-1]),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        query_start_loc=starts,
        seq_lens=np.array(lengths),
        block_table=table,
        sampling=np.arange(len(lengths)),
        logits_indices=starts[1:] - 1,
    )


@pytest.mark.parametrize("compiled", [variant for variant in EVERY_VARIANT if variant != "off"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("dims", "block_size", "options"),
    [((64, 64), 16, PLAIN), ((64, 32), 16, ALL_OPTIONS), ((48, 80), 5, PLAIN)],
)
def test_kernels_and_torch_keep_the_same_codes_and_see_the_same(
    compiled: str,
    dtype: torch.dtype,
    dims: tuple[int, int],
    block_size: int,
    options: AttentionOptions,
) -> None:
    layer, num_blocks = LayerSpec(2, *dims), len(LENGTHS) * -(-max(LENGTHS) // block_size)
    spec = KVCacheSpec((layer,), torch.int8)
    ours = CompiledAttention(Kernels(compiled), spec, num_blocks, block_size)
    plain = TorchPagedAttention(spec, num_blocks, block_size)
    exact = TorchPagedAttention(KVCacheSpec((layer,), dtype), num_blocks, block_size)
    generator, total = torch.Generator().manual_seed(0), sum(LENGTHS)
    query = torch.randn(total, 6, dims[0], generator=generator).to(dtype)
    key, value = (torch.randn(total, 2, dim, generator=generator).to(dtype) for dim in dims)
    last = torch.from_numpy(np.cumsum(LENGTHS)) - 1

    def attend(backend: AttentionBackend) -> list[Tensor]:
        backend.prepare(rows_of(LENGTHS, LENGTHS, block_size))
        prompts = backend.forward(0, query, key, value, options)
        backend.prepare(rows_of(LENGTHS, [1] * len(LENGTHS), block_size))
        decodes = backend.forward(0, query[last], key[last], value[last], options)
        whole = rows_of(LENGTHS, LENGTHS, block_size)
        images = [np.arange(4, 18), np.arange(150, 450)]  # of the second row, and of the last
        ends = ImageEnds.of(whole.positions, images, only_in_windows=False)
        backend.prepare(replace(whole, image_ends=ends))
        seeing = backend.forward(0, query, key, value, options)
        assert not torch.equal(seeing, prompts)
        return [prompts.float(), decodes.float(), seeing.float()]

    found, expected, unrounded = map(attend, (ours, plain, exact))
    assert torch.equal(ours.key_caches[0], plain.key_caches[0])
    assert torch.equal(ours.value_caches[0], plain.value_caches[0])
    for own, other, whole in zip(found, expected, unrounded, strict=True):
        torch.testing.assert_close(own, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert float((own - whole).abs().max()) < 0.08
        assert float((own - whole).square().mean().sqrt()) < 0.01


def test_rows_of_nothing_of_too_little_and_of_too_much_are_kept(variant: str) -> None:
    states = torch.zeros(6, 1, 16)
    states[1] = 1e-35
    states[2, 0, :3] = torch.tensor([float("nan"), float("inf"), -3.0])
    states[3, 0, 0] = torch.finfo(torch.float32).max
    states[4, 0] = torch.linspace(-1, 1, 16)
    states[5, 0] = torch.arange(16) / 2  # halves of a step go to even codes
    states[5, 0, 15] = 127
    step = rows_of([6], [6], 8)
    spec = KVCacheSpec((LayerSpec(1, 16, 16),), torch.int8)
    backend: AttentionBackend = TorchPagedAttention(spec, 1, 8)
    if variant != "off":
        backend = CompiledAttention(load_kernels(), spec, 1, 8)
    backend.prepare(step)
    backend.forward(0, states, states, states, PLAIN)
    rows = backend.key_caches[0][0, 0]
    codes, scales = rows[:6, :16].float(), rows[:6, 16:].contiguous().view(torch.float32)
    kept = states[:, 0].nan_to_num(nan=0.0, posinf=0.0)
    kept[1] = 0  # too small
    assert torch.equal(codes.abs().amax(1) == 127, torch.tensor([0, 0, 1, 1, 1, 1]).bool())
    assert bool(((codes * scales - kept).abs() <= kept.abs().amax(1, True) / 253.9).all())
    assert torch.equal(codes[5, :5], torch.tensor([0.0, 0.0, 1.0, 2.0, 2.0]))
    assert not rows[6:].any()
    assert bool((codes * scales).isfinite().all())


def logprobs(driver: Driver, name: str, prompt: list[int]) -> Tensor:
    """Of the five best of each token of the output."""
    driver.add(name, prompt, SamplingParams(temperature=0, logprobs=5))
    driver.generate(name, 8)
    return torch.tensor([entry.top_logprobs for entry in driver.sequences[name].logprobs])


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # compiled whole, and layer by layer
def test_a_model_is_close_to_itself_however_its_cache_came_about(
    variant: str, kind: str, make_driver: MakeDriver
) -> None:
    chance = random.Random(0)
    prompt = [chance.randrange(VOCAB_SIZE) for _ in range(90)]
    exact = logprobs(make_driver(kind, dtype="float32"), "a", prompt)
    driver = make_driver(kind, dtype="float32", kv_cache_dtype="int8")
    at_once = logprobs(driver, "at once", prompt)
    assert at_once.shape == exact.shape
    difference = float((at_once - exact).abs().max())
    assert 0 < difference < 0.2
    # a prefix that another has computed, chunks, and a preemption
    driver.add("parts", prompt, SamplingParams(temperature=0, logprobs=5))
    driver.share_prefix("parts", "at once", 3)
    driver.step({"parts": 30})
    driver.generate("parts", 4)
    driver.preempt("parts")
    driver.generate("parts", 8)
    parts, once = driver.sequences["parts"], driver.sequences["at once"]
    assert parts.output == once.output
    for own, other in zip(parts.logprobs, once.logprobs, strict=True):
        assert own.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_the_pool_of_int8_has_nearly_four_times_the_blocks_of_float32(
    model_path: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    counts = []
    kinds: list[Literal["auto", "int8"]] = ["auto", "int8"]
    for kind in kinds:
        plain = make_config(model_path("llama"), dtype="float32")
        cache = CacheConfig(kv_cache_gib=1 / 1024, block_size=8, kv_cache_dtype=kind)
        config = EngineConfig(model=plain.model, cache=cache, runner=plain.runner)
        runner = load_on_cpu(config, ModelInfo(config.model))
        counts.append(runner.info.num_kv_blocks)
        runner.close()
    # K and V of 3 layers and 2 heads: 16 numbers of 4 bytes, or 16 bytes and a scale
    assert counts == [(1 << 20) // (8 * 12 * 64), (1 << 20) // (8 * 12 * 20)]
    assert [", int8 cache;" in r.message for r in caplog.records if "KV pool" in r.message] == [
        *(False, True)
    ]


def test_heads_with_no_room_for_a_scale_behind_them_are_refused(tmp_path: Path) -> None:
    make_model("llama", tmp_path, head_dim=6)
    config = make_config(tmp_path, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="a multiple of 4, but the model has heads of 6"):
        load_on_cpu(config, ModelInfo(config.model))


def test_codes_of_another_compute_type_are_no_blocks_of_ours(make_driver: MakeDriver) -> None:
    """As both are for dtype "auto", on machines that share a directory."""
    runners = [
        make_driver(dtype=dtype, kv_cache_dtype="int8").runner for dtype in ("float32", "bfloat16")
    ]
    assert len({runner.copies.make(1 << 20).layout for runner in runners}) == 2
