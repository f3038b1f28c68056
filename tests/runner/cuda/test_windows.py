"""Layers with a sliding window have pages of their own on a device: the tokens of `transformers`.

In pieces, beside others, from prefixes, after preemptions, two steps ahead, with guesses, from
CUDA graphs, with blocks outside the card, after sleep, on two ranks.
"""

import asyncio
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aioserve import AsyncEngine, EngineConfig
from aioserve.config import CacheConfig, SchedulerConfig, SpeculationConfig
from aioserve.errors import ConfigError
from aioserve.features.spec_decode.draft_length import DraftLength
from aioserve.features.spec_decode.model_drafter import ModelDraftLength
from aioserve.features.states.windows import WindowBlockPool
from aioserve.gpu.cuda import flashinfer_attention
from aioserve.gpu.cuda import load as loading
from aioserve.gpu.cuda.executor import DecodeGraphs
from aioserve.gpu.cuda.flashinfer_attention import FlashInferAttention, why_not
from aioserve.gpu.cuda.runner import SleepingOverlappedRunner
from aioserve.scheduler.output import SchedulerOutput
from tests.engine.pausing_policy import OffloadsAtEveryTurn
from tests.kit import (
    executor_of,
    expected_tokens,
    greedy,
    make_prompts,
    runner_of,
    small_config,
    stats_of,
    tokens_of,
)
from tests.kv_connector.serving import (
    connector_stats,
    files_in,
    load_at_any_price,
    next_turns,
    on_disk,
    run_all,
)
from tests.models import make_model
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.fake_flashinfer import FakeFlashInfer
from tests.runner.cuda.on_device import make_device_runner
from tests.slow import mostly_slow

WINDOW, NUM_TOKENS = 24, 24
#: Every layer has a window, so that the main pool has nothing; one of three has none; every other
#: one has none, and there are sinks.
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_oss": {},
}
#: At block size 8, four requests of 88 tokens have 44 blocks, half of which fit here.
CACHE = CacheConfig(num_kv_blocks=64, block_size=8, num_window_blocks=21)
TWO_AHEAD = SchedulerConfig(
    policy="chunked_prefill", max_num_seqs=4, max_num_batched_tokens=24, pipeline_depth=2
)

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


@pytest.fixture(autouse=True)
def every_draft_and_every_load_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether one does depends on how quick the machine is."""
    load_at_any_price(monkeypatch)

    def stepped(self: DraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        pass

    for kind in (DraftLength, ModelDraftLength):
        monkeypatch.setattr(kind, "stepped", stepped)


@pytest.fixture(scope="module", params=mostly_slow(MODELS, but=["mistral", "gemma3_text"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    return make_model(request.param, folder, **MODELS[request.param])


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What `transformers` generates for each prompt alone."""
    return expected_tokens(model, NUM_TOKENS)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(1, eagerness=0.3)


@pytest.fixture
def flashinfer(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFlashInfer]:
    """The stand-in, also for float32, which flashinfer itself does not serve."""

    def as_halves(spec: Any, calls: Any, dtype: Any, num_tokens: int) -> str | None:
        return why_not(spec, calls, torch.bfloat16, num_tokens)

    fake = FakeFlashInfer(device, None)
    monkeypatch.setattr(loading, "why_not", as_halves)
    monkeypatch.setattr(flashinfer_attention, "WORKSPACE_BYTES", 1)  # no stand-in uses it
    monkeypatch.setitem(sys.modules, "flashinfer", fake.module())
    yield fake
    assert fake.num_plans


def serving(config: EngineConfig, device: FakeDevice) -> AsyncEngine:
    return AsyncEngine(config, runner=make_device_runner(config, device))


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="chunks"),
        pytest.param(
            {
                "cache": CacheConfig(
                    num_kv_blocks=18, block_size=8, watermark=0, num_window_blocks=28
                ),
                "scheduler": SchedulerConfig(policy="fcfs", max_num_seqs=4, pipeline_depth=2),
            },
            id="preempted",
        ),
        pytest.param(
            {
                "cache": CacheConfig(num_kv_blocks=64, block_size=4, num_window_blocks=30),
                "scheduler": TWO_AHEAD,
            },
            id="two steps ahead",
        ),
        pytest.param(
            {"speculation": SpeculationConfig(speculative_method="ngram", prompt_lookup_min=1)},
            id="guesses",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_pressure_changes_no_token(
    model: Path,
    expected: list[list[int]],
    sections: dict[str, Any],
    flashinfer: FakeFlashInfer,
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second time, texts are found as prefixes."""
    config = small_config(model, **{"cache": CACHE, **sections})
    if config.scheduler.pipeline_depth is None:
        scheduler = msgspec.structs.replace(config.scheduler, pipeline_depth=1)
        config = msgspec.structs.replace(config, scheduler=scheduler)
    replayed: list[int] = []
    replay = DecodeGraphs.replay

    def noted(self: DecodeGraphs, size: int) -> torch.Tensor:
        replayed.append(size)
        return replay(self, size)

    monkeypatch.setattr(DecodeGraphs, "replay", noted)
    async with serving(config, device) as engine:
        attention = executor_of(engine)._attention
        assert isinstance(attention, FlashInferAttention)
        assert stats_of(engine).num_window_blocks == config.cache.num_window_blocks
        for _ in range(2):
            found = await asyncio.gather(
                *(tokens_of(engine, prompt, greedy(NUM_TOKENS)) for prompt in make_prompts())
            )
            assert found == expected
        stats = stats_of(engine)
        assert stats.num_used_window_blocks == 0
        assert config.cache.num_kv_blocks != 18 or stats.num_preemptions
        assert "speculation" not in sections or stats.num_draft_tokens > stats.num_accepted_tokens
    assert replayed


async def test_what_has_left_its_window_spoils_nothing(
    model: Path,
    expected: list[list[int]],
    flashinfer: FakeFlashInfer,
    device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kernel multiplies by 0 what it masks, and no number would stay none: so it gets no page but
    those that hold what tokens of its request see.
    """
    made: list[WindowBlockPool] = []
    init = WindowBlockPool.__init__

    def noted(self: WindowBlockPool, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(WindowBlockPool, "__init__", noted)
    cache = msgspec.structs.replace(CACHE, enable_prefix_caching=False)
    scheduler = msgspec.structs.replace(TWO_AHEAD, pipeline_depth=1)
    async with serving(small_config(model, cache=cache, scheduler=scheduler), device) as engine:
        executor = executor_of(engine)
        (dim,) = {layer.key_head_dim for layer in executor._model.kv_cache_spec.layers}
        launch, counts, num_spoilt = executor.launch, made[-1].pool.ref_counts, 0

        def launch_on_few(step: SchedulerOutput) -> Any:
            nonlocal num_spoilt
            free = [block for block, count in enumerate(counts) if not count]
            num_spoilt += len(free)
            for pages in executor._attention.cache.window_tensors:
                pages[free, ..., :dim] = torch.nan  # not the zeros behind heads stored wider
            return launch(step)

        executor.launch = launch_on_few
        assert await run_all(engine, NUM_TOKENS) == expected
        assert num_spoilt > 100


async def test_a_reply_goes_on_from_cached_prefixes_in_plain_torch(
    model: Path, expected: list[list[int]], device: FakeDevice
) -> None:
    """As far as the window before their ends is there."""
    cache = CacheConfig(num_kv_blocks=128, block_size=8, num_window_blocks=80)
    async with serving(small_config(model, cache=cache, scheduler=TWO_AHEAD), device) as engine:
        prompts = make_prompts()
        found = await asyncio.gather(*(tokens_of(engine, p, greedy(NUM_TOKENS)) for p in prompts))
        assert found == expected
        num_hits = stats_of(engine).num_prefix_hit_tokens
        await next_turns(engine, expected)
        assert stats_of(engine).num_prefix_hit_tokens > num_hits + 200


@pytest.mark.parametrize(
    ("model", "kind", "depth"),
    mostly_slow(
        itertools.product(MODELS, ["memory", "disk"], [1, 2]),
        but=[("gemma3_text", "disk", 2), ("mistral", "memory", 2)],
    ),
    indirect=["model"],
)
async def test_blocks_of_windows_from_outside_the_card_give_the_same_tokens(
    model: Path,
    expected: list[list[int]],
    kind: str,
    depth: int,
    device: FakeDevice,
    tmp_path: Path,
) -> None:
    own = on_disk(tmp_path) if kind == "disk" else {"kv_connector": kind}
    cache = CacheConfig(
        num_kv_blocks=36,
        block_size=8,
        watermark=0.0,
        num_window_blocks=26,
        kv_connector_gib=1 / 64,
        **own,
    )
    scheduler = SchedulerConfig(policy="fcfs", max_num_seqs=4, pipeline_depth=depth)
    async with serving(small_config(model, cache=cache, scheduler=scheduler), device) as engine:
        for _ in range(3):
            assert await run_all(engine, NUM_TOKENS) == expected
        await next_turns(engine, expected)
        stats = connector_stats(engine)
        assert stats.num_hit_tokens > 0
        assert stats.num_bytes_loaded > 0
        assert stats.num_failures == 0
    assert kind == "memory" or files_in(tmp_path, "*.windows.kv")


@pytest.mark.slow
async def test_what_policies_swap_comes_back_with_its_window(
    model: Path, expected: list[list[int]], device: FakeDevice
) -> None:
    before = OffloadsAtEveryTurn.num_offloads, OffloadsAtEveryTurn.num_prefetches
    cache = CacheConfig(
        num_kv_blocks=44,
        block_size=8,
        watermark=0.0,
        num_window_blocks=40,
        kv_connector="memory",
        kv_connector_gib=1 / 64,
    )
    policy = f"{OffloadsAtEveryTurn.__module__}:{OffloadsAtEveryTurn.__name__}"
    scheduler = SchedulerConfig(policy=policy, max_num_seqs=4, pipeline_depth=2)
    async with serving(small_config(model, cache=cache, scheduler=scheduler), device) as engine:
        for _ in range(2):
            assert await run_all(engine, NUM_TOKENS) == expected
        assert connector_stats(engine).num_hit_tokens > 0
    assert OffloadsAtEveryTurn.num_offloads > before[0] + 10
    assert OffloadsAtEveryTurn.num_prefetches > before[1]


@pytest.mark.slow
async def test_a_drafting_model_keeps_all_blocks_of_its_own(
    model: Path, expected: list[list[int]], device: FakeDevice
) -> None:
    """It has the same weights, so that most guesses are right."""
    speculation = SpeculationConfig(speculative_method="draft", draft_model=str(model))
    scheduler = SchedulerConfig(
        policy="chunked_prefill", max_num_batched_tokens=24, max_num_seqs=4, pipeline_depth=1
    )
    config = small_config(model, cache=CACHE, scheduler=scheduler, speculation=speculation)
    async with serving(config, device) as engine:
        assert await run_all(engine, NUM_TOKENS) == expected
        stats = stats_of(engine)
        assert stats.num_accepted_tokens > 20
        assert stats.num_window_blocks == 21


@pytest.mark.parametrize("model", mostly_slow(MODELS, but=["gemma3_text"]), indirect=True)
@pytest.mark.parametrize("cache", [{"num_window_blocks": 21}, {}], ids=["set", "default"])
async def test_a_card_that_has_slept_has_as_many_blocks_of_windows_as_before(
    model: Path, expected: list[list[int]], cache: dict[str, Any], device: FakeDevice
) -> None:
    own = CacheConfig(block_size=8, kv_cache_gib=1 / 256, **cache)
    async with serving(small_config(model, cache=own, scheduler=TWO_AHEAD), device) as engine:
        runner: SleepingOverlappedRunner = runner_of(engine)
        assert runner._executor is not None
        windows = runner._executor.info.windows
        assert windows is not None
        assert await run_all(engine, NUM_TOKENS) == expected
        await engine.sleep(weights=True)
        await engine.wake()
        assert runner._executor is not None
        assert runner._executor.info.windows == windows
        assert await run_all(engine, NUM_TOKENS) == expected


@pytest.mark.parametrize("model", mostly_slow(MODELS, but=["gemma3_text"]), indirect=True)
async def test_a_card_that_has_slept_has_one_pool_where_it_had_one(
    model: Path, expected: list[list[int]], device: FakeDevice
) -> None:
    """Too little memory for the steps of the longest request makes one pool at first."""
    cache = CacheConfig(block_size=8, kv_cache_gib=1 / 2048)
    scheduler = SchedulerConfig(policy="chunked_prefill", max_num_seqs=4, pipeline_depth=2)
    config = small_config(model, cache=cache, scheduler=scheduler)
    long = msgspec.structs.replace(config.model, max_model_len=None)
    async with serving(msgspec.structs.replace(config, model=long), device) as engine:
        assert stats_of(engine).num_window_blocks == 0
        assert await run_all(engine, NUM_TOKENS) == expected
        await engine.sleep(weights=True)
        await engine.wake()
        assert await run_all(engine, NUM_TOKENS) == expected


async def test_window_blocks_for_a_model_without_windows_are_refused(
    device: FakeDevice, tmp_path: Path
) -> None:
    plain = make_model("llama", tmp_path, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"no layer of .*Llama.* has a sliding window shorter"):
        async with serving(small_config(plain, cache=CACHE), device):
            pass
