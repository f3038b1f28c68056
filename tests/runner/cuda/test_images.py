"""Models that see on a device: the greedy tokens of `transformers`, whatever else is in flight."""

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aioserve import AsyncEngine, EngineConfig
from aioserve.config import RunnerConfig
from aioserve.errors import RequestFailedError
from aioserve.features.multimodal.image_encoder import ImageEncoder
from aioserve.gpu.cuda import flashinfer_attention
from aioserve.gpu.cuda import load as loading
from aioserve.gpu.cuda.executor import DecodeGraphs, StepExecutor
from aioserve.gpu.cuda.flashinfer_attention import FlashInferAttention, why_not
from aioserve.gpu.cuda.sharded_runner import ShardedOverlappedRunner
from aioserve.model_source.info import ModelInfo
from aioserve.runner.ranks import Ranks
from tests.kit import executor_of
from tests.multimodal import test_videos
from tests.multimodal.test_vision_language import (
    ONE,
    broken,
    collect,
    cut_layers,
    make_config,
    settings_of,
    stats_of,
)
from tests.processes import COMPUTING_SECONDS
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.fake_flashinfer import FakeFlashInfer
from tests.runner.cuda.on_device import make_device_runner, make_rank
from tests.seeing_models import FEW_KINDS, SEEING_KINDS, Seeing, picture
from tests.slow import mostly_slow

pytest.importorskip("PIL")

# The loop is the subject of other tests; these load a model each.
on_one_loop = pytest.mark.asyncio(loop_factories=["uvloop"])
CASES = ("chunks", "unfused", "whole", "starved", "encoder", "pieces")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seeing]:
    made: dict[str, Seeing] = {}

    def get(kind: str) -> Seeing:
        if kind not in made:
            made[kind] = Seeing(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return get


def make_config_of(kind: str, case: str, model: Seeing, **scheduler: Any) -> EngineConfig:
    return make_config(model, **{**settings_of(kind, case), "pipeline_depth": 2, **scheduler})


async def serve(config: EngineConfig, device: FakeDevice, prompts: Any) -> tuple[Any, Any]:
    async with AsyncEngine(config, runner=make_device_runner(config, device)) as engine:
        tokens = await asyncio.gather(*(collect(engine, *prompt) for prompt in prompts))
        return tokens, stats_of(engine)


@on_one_loop
@pytest.mark.parametrize("case", mostly_slow(CASES, but=["chunks"]))
@pytest.mark.parametrize("kind", mostly_slow(SEEING_KINDS, but=FEW_KINDS))
async def test_tokens_are_those_of_generate(
    seeing: Callable[[str], Seeing], kind: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks that cut images, beside decodes, two steps in flight."""
    cut_layers(monkeypatch)
    model, device = seeing(kind), FakeDevice(1, eagerness=0.3)
    prompts = model.prompts()
    tokens, stats = await serve(make_config_of(kind, case, model), device, prompts)
    assert tokens == [model.tokens(text, images) for text, images in prompts]
    assert tokens[4] != tokens[5]
    assert stats.num_encoder_inputs >= 4
    assert device.num_behind > 1
    if case == "starved":
        assert stats.num_preemptions
    if case == "pieces":
        assert device.num_lent  # by threads, which are over
        names = [thread.name for thread in threading.enumerate()]
        assert "aioserve-encoder" not in names


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The device of flashinfer's stand-in, which serves float32 as well."""

    def as_halves(spec: Any, calls: Any, dtype: Any, num_tokens: int) -> str | None:
        return why_not(spec, calls, torch.bfloat16, num_tokens)

    device = FakeDevice(1, eagerness=0.3)
    monkeypatch.setattr(loading, "why_not", as_halves)
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1)  # no stand-in uses it
    monkeypatch.setitem(sys.modules, "flashinfer", FakeFlashInfer(device, None).module())
    return device


@on_one_loop
@pytest.mark.parametrize(
    "kind",
    mostly_slow(["gemma3", "gemma4", "qwen2_5_vl", "idefics3"], but=["gemma3", "qwen2_5_vl"]),
)
async def test_images_go_beside_decodes_that_are_replayed(
    seeing: Callable[[str], Seeing],
    kind: str,
    flashinfer: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens of an image of Gemma see each other, for which the attention has no kernel."""
    model, replayed = seeing(kind), list[int]()
    replay = DecodeGraphs.replay

    def noted(self: DecodeGraphs, size: int) -> torch.Tensor:
        replayed.append(size)
        return replay(self, size)

    monkeypatch.setattr(DecodeGraphs, "replay", noted)
    config, prompts = make_config_of(kind, "chunks", model), model.prompts()
    async with AsyncEngine(config, runner=make_device_runner(config, flashinfer)) as engine:
        assert isinstance(executor_of(engine)._attention, FlashInferAttention)
        tokens = await asyncio.gather(*(collect(engine, *prompt) for prompt in prompts))
    assert tokens == [model.tokens(text, images) for text, images in prompts]
    assert replayed


@on_one_loop
@pytest.mark.parametrize("case", ["chunks", "pieces"])
async def test_an_image_that_cannot_be_encoded_fails_who_needs_it(
    seeing: Callable[[str], Seeing], case: str
) -> None:
    model = seeing(ONE)
    config = make_config_of(ONE, case, model)
    bad, good = picture(1, 60, 60).point(lambda _: 255), picture(2, 60, 60)
    text = f"{model.mark} What is this?"
    async with AsyncEngine(config, runner=make_device_runner(config, FakeDevice(2))) as engine:
        beside = asyncio.create_task(collect(engine, "Nothing", [], max_tokens=60))
        with broken(engine, lambda pixels: bool((pixels == 1).flatten(1).all(1).any())):
            found = await asyncio.gather(
                collect(engine, text, [bad]), collect(engine, text, [good]), return_exceptions=True
            )
        again = await collect(engine, text, [bad])  # nothing of the failure is left
        assert len(await beside) == 60
    assert isinstance(found[0], RequestFailedError)
    assert "an image of this request could not be encoded: what is this?" in str(found[0])
    assert found[1] == model.tokens(text, [good])
    assert again == model.tokens(text, [bad])


@on_one_loop
async def test_a_device_keeps_as_much_of_images_as_was_planned(
    seeing: Callable[[str], Seeing],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    model, most = seeing("qwen3_vl"), list[int]()
    run = ImageEncoder.run

    def noting(self: ImageEncoder, step: Any) -> None:
        run(self, step)
        most.append(sum(rows.untyped_storage().nbytes() for rows in self._made.values()))

    monkeypatch.setattr(ImageEncoder, "run", noting)
    monkeypatch.setattr(loading, "GIB", 1 << 10)  # so that the line has digits enough
    prompts = [(f"{i} {model.mark} What is it?", [picture(i, 60, 60)]) for i in range(6)]
    config = make_config_of("qwen3_vl", "chunks", model, encoder_cache_tokens=140)
    tokens, stats = await serve(config, FakeDevice(3), prompts)
    assert tokens == [model.tokens(*prompt) for prompt in prompts]
    planned = 140 * 64 * 4 * 3  # hidden size, float32, and what two more layers are given
    assert f"encoded images {planned / 1024:.2f}," in caplog.text
    assert stats.num_encoder_tokens > 140
    assert planned / 2 < max(most) <= planned


@on_one_loop
async def test_videos_are_read_on_a_device(seeing: Callable[[str], Seeing]) -> None:
    model = seeing("qwen2_5_vl")
    prompts = test_videos.prompts_of(model)
    config = test_videos.make_config(model, options={"chunk_size": 37}, pipeline_depth=2)
    runner = make_device_runner(config, FakeDevice(4, eagerness=0.3))
    tokens, stats = await test_videos.serve(config, prompts, runner)
    assert tokens == test_videos.expected_of(model, prompts)
    assert stats.num_encoder_inputs


class OnDevices(ShardedOverlappedRunner):
    _rank_module = "tests.runner.cuda.device_rank"


@on_one_loop
@pytest.mark.dist
@pytest.mark.parametrize("kind", mostly_slow(["gemma3", "qwen2_5_vl"], but=["qwen2_5_vl"]))
async def test_two_ranks_on_devices_read_images(
    seeing: Callable[[str], Seeing], kind: str, tmp_path: Path
) -> None:
    """The first one encodes, while steps are in flight, and tells the other one the rows."""
    model = seeing(kind)
    runner = RunnerConfig(tensor_parallel_size=2, rank_timeout=COMPUTING_SECONDS)
    config = msgspec.structs.replace(make_config_of(kind, "pieces", model), runner=runner)
    info = ModelInfo(config.model)

    def build(ranks: Ranks, grammars: Any) -> StepExecutor:
        torch.set_num_threads(1)
        return make_rank(config, info, FakeDevice(5, eagerness=0.5), ranks, grammars)

    prompts = model.prompts()
    async with AsyncEngine(config, runner=OnDevices(config, info, build)) as engine:
        tokens = await asyncio.gather(*(collect(engine, *prompt) for prompt in prompts))
    assert tokens == [model.tokens(text, images) for text, images in prompts]
