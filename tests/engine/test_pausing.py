"""A policy that pauses requests at every turn changes no token, whatever runs beside them."""

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.engine.live_feed import FeedObserver
from aioserve.engine.tracing import Timelines
from aioserve.testing import SchedulerHarness
from tests.engine.pausing_policy import PausesAtEveryTurn
from tests.kit import greedy, run, stats_of
from tests.models import make_model
from tests.slow import mostly_slow

PAUSING = f"{PausesAtEveryTurn.__module__}:{PausesAtEveryTurn.__name__}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("pausing"))


def config(model: Path, policy: str, *, num_kv_blocks: int = 400, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model=str(model), dtype="float32", max_model_len=96, skip_tokenizer_init=True
        ),
        cache=CacheConfig(block_size=4, num_kv_blocks=num_kv_blocks),
        scheduler=SchedulerConfig(policy=policy, max_num_seqs=4, **scheduler),
        runner=RunnerConfig(threads=1),
    )


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share beginnings; drawn with seeds, with penalties, logprobs of both kinds."""
    found = []
    for i in range(12):
        prompt = [3 + i % 2] * 20 + [(7 * i + j * j) % 50 + 3 for j in range(4 + 5 * i % 31)]
        params = SamplingParams(
            temperature=0.9 * (i % 3 != 0),
            seed=i,
            max_tokens=12 + i,
            presence_penalty=0.5 * (i % 4 == 1),
            min_tokens=6 * (i % 5 == 2),
            logprobs=2 if i % 2 else None,
            prompt_logprobs=1 if i % 6 == 3 else None,
            detokenize=False,
            output_kind="final_only",
        )
        found.append((prompt, params))
    return found


async def run_all(engine: AsyncEngine) -> list[Any]:
    """Tokens and numbers of each, which come at times that a seed draws."""
    rng = random.Random(5)

    async def run(prompt: list[int], params: SamplingParams, after: float) -> Any:
        await asyncio.sleep(after)
        async for output in engine.generate(prompt, params):
            last = output
        entries = (*(last.prompt_logprobs or ()), *(last.logprobs or ()))
        told = [entry.logprob for entry in entries if entry is not None]
        return last.token_ids, told

    return await asyncio.gather(*(run(*one, rng.random() / 50) for one in requests()))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    async def run() -> list[Any]:
        async with AsyncEngine(config(model, "fcfs")) as engine:
            return await run_all(engine)

    return asyncio.run(run())


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize(
    ("num_kv_blocks", "depth"),
    mostly_slow(itertools.product([400, 34], [1, 2]), but=[(400, 1), (34, 2)]),
)
async def test_tokens_are_those_without_pauses(
    model: Path, expected: list[Any], depth: int, num_kv_blocks: int
) -> None:
    """With room for all, and with so few blocks that what is paused has to give way."""
    before = PausesAtEveryTurn.num_pauses
    settings = config(model, PAUSING, num_kv_blocks=num_kv_blocks, pipeline_depth=depth)
    async with AsyncEngine(settings) as engine:
        for _ in range(2):
            for (tokens, told), (tokens_due, due) in zip(
                await run_all(engine), expected, strict=True
            ):
                assert tokens == tokens_due
                assert told == pytest.approx(due, abs=1e-4)
        stats = stats_of(engine)
    assert PausesAtEveryTurn.num_pauses > before + 20
    assert stats.num_paused_reqs == stats.num_used_kv_blocks == 0
    assert (stats.num_preemptions > 0) == (num_kv_blocks < 100)


def test_an_inspection_and_a_scrape_tell_which_requests_are_paused() -> None:
    """One seat: the first request steps aside for the second, whose reader has nothing yet."""
    recipe = Path(__file__).parents[2] / "examples/recipes/reading_speed.py"
    settings = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        cache=CacheConfig(num_kv_blocks=64),
        scheduler=SchedulerConfig(
            policy=f"{recipe}:ReadingSpeedScheduler",
            options={"reading_speed": 4.0, "buffer": 0.5},
            max_num_seqs=1,
        ),
    )

    async def main(engine: AsyncEngine) -> None:
        first = await engine.add_request([1] * 9, greedy(200), request_id="first")
        for _ in range(20):
            await anext(first)
        second = await engine.add_request([2] * 9, greedy(100), request_id="second")
        await anext(second)
        assert stats_of(engine).num_paused_reqs == 1
        snapshot = engine.inspect()
        assert snapshot is not None
        assert [r.status for r in snapshot.requests] == ["paused", "running"]
        assert b"aioserve_num_requests_paused 1.0" in engine.internals.render_metrics([])
        async with first, second:
            assert [output.num_output_tokens async for output in second][-1] == 100
            assert [output.num_output_tokens async for output in first][-1] == 200
        assert stats_of(engine).num_preemptions == 0

    run(main, settings)


def test_traces_and_the_page_tell_pauses_apart_from_preemptions() -> None:
    harness = SchedulerHarness(PausesAtEveryTurn)
    policy = harness.scheduler
    assert isinstance(policy, PausesAtEveryTurn)
    feed, timelines = FeedObserver(lambda: policy, policy, lambda: harness.now), Timelines()
    for name, token in (("a", 1), ("b", 2)):
        request = harness.add_request(name, [token] * 9, max_tokens=20)
        feed.on_added(request, harness.now)
        timelines.on_added(request, harness.now)
    states = set()
    while not harness.finished:
        for output in harness.step():
            feed.on_planned(output, harness.now)
            timelines.on_planned(output, harness.now)
        states |= {stands.state for stands in feed.picture()[0]}
    planned = feed.take_events().planned
    assert sum(len(plan.paused) for plan in planned) > 4
    assert not any(plan.preempted for plan in planned)
    assert {"paused", "running"} <= states
    timeline = timelines.take("a")
    assert timeline is not None
    assert {name for name, _ in timeline.left} == {"paused"}
    assert len(timeline.left) - len(timeline.resumed) in (0, 1)
