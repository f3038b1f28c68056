"""Rows whose masks come too late sit steps out, and get the tokens that they would have got."""

import asyncio
import time
from typing import Any

import pytest

from aioserve import AsyncEngine, SamplingParams
from aioserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.errors import GrammarLimitError
from aioserve.features.grammars import rows
from aioserve.features.grammars.rows import GrammarRows, MaskLanes
from aioserve.params import StructuredOutputs
from tests.engine.test_async_engine import until_idle
from tests.engine.test_structured_outputs import of_schema, params, replies, reply
from tests.kit import stats_of
from tests.processes import PATIENCE
from tests.slow import mostly_slow

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

WANTED = [
    *(params(seed, way=of_schema("flat"), max_tokens=90, logprobs=1) for seed in range(4)),
    *(params(seed, way=of_schema("nested"), max_tokens=90) for seed in range(4)),
    *(SamplingParams(max_tokens=60, temperature=1.0, seed=seed) for seed in range(4)),
    params(7, way=StructuredOutputs(regex="[a-z ]{200}"), max_tokens=60, repetition_penalty=1.1),
    params(8, way=StructuredOutputs(regex="(ab|cd){3}-(ab|cd){40}"), stop="-"),
]


def config(method: str = "none", **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(max_model_len=176, dtype="float32"),
        cache=CacheConfig(num_kv_blocks=11),  # much less than these requests want together
        scheduler=SchedulerConfig(max_num_seqs=16, **scheduler),
        speculation=SpeculationConfig(speculative_method=method),
        runner=RunnerConfig(threads=1),
    )


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every mask counts as slow, and no step waits for one. How many rows sat each step out."""
    found: list[int] = []
    taken = GrammarRows.taken

    def noted(self: GrammarRows, *args: Any) -> Any:
        masks = taken(self, *args)
        found.append(len(masks.late))
        return masks

    monkeypatch.setattr(GrammarRows, "taken", noted)
    monkeypatch.setattr(rows, "SLOW_SECONDS", -1.0)
    monkeypatch.setattr(rows, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(rows, "LAST_SECONDS", PATIENCE)
    fill = MaskLanes._fill

    def slowly(self: MaskLanes, job: Any) -> Any:
        seen, give_up = len(found), time.monotonic() + 0.1
        while len(found) == seen and time.monotonic() < give_up:  # until a step went without it
            time.sleep(0.0005)
        return fill(self, job)

    monkeypatch.setattr(MaskLanes, "_fill", slowly)
    return found


async def expected(**scheduler: Any) -> list[Any]:
    async with AsyncEngine(config(**scheduler)) as engine:
        return [(o.token_ids, o.finish_reason) for o in await replies(engine, WANTED)]


@pytest.mark.parametrize("depth", mostly_slow([1, 2], but=[2]))
async def test_rows_that_sit_steps_out_get_the_same_tokens(
    depth: int, request: pytest.FixtureRequest
) -> None:
    usual = await expected(pipeline_depth=depth)
    late: list[int] = request.getfixturevalue("late")
    async with AsyncEngine(config(pipeline_depth=depth)) as engine:
        found = await replies(engine, WANTED)
        assert stats_of(engine).num_preemptions > 0
        await until_idle(engine)
    assert sum(late) > 100
    assert [(o.token_ids, o.finish_reason) for o in found] == usual
    for wanted, output in zip(WANTED, found, strict=True):
        if wanted.logprobs is not None:
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids)


async def test_rows_with_drafts_sit_steps_out(request: pytest.FixtureRequest) -> None:
    usual = await expected()
    late: list[int] = request.getfixturevalue("late")
    async with AsyncEngine(config("ngram")) as engine:
        found = await replies(engine, WANTED)
    assert sum(late) > 50
    assert [o.token_ids for o in found] == [token_ids for token_ids, _ in usual]


async def test_a_mask_that_never_comes_keeps_its_own_row_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go_on = asyncio.Event()
    loop = asyncio.get_running_loop()
    fill = MaskLanes._fill

    def stands_still(self: MaskLanes, job: Any) -> Any:
        asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result(60)
        return fill(self, job)

    monkeypatch.setattr(MaskLanes, "_fill", stands_still)
    async with AsyncEngine(config()) as engine:
        free = SamplingParams(max_tokens=12, temperature=0)
        bound = asyncio.create_task(
            reply(engine, params(way=StructuredOutputs(regex="[a-z]{9}"), max_tokens=30))
        )
        others = [(await reply(engine, free)).token_ids for _ in range(3)]
        assert not bound.done()
        may_go_on.set()
        assert len((await bound).text) == 9
    assert others[0] == others[1] == others[2]


async def test_samples_that_have_said_the_same_share_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    start = MaskLanes.start

    def noted(self: MaskLanes, jobs: Any, **lane: Any) -> None:
        made.append(len(jobs))
        start(self, jobs, **lane)

    monkeypatch.setattr(MaskLanes, "start", noted)
    wanted = params(way=StructuredOutputs(regex="[a-z]{40}"), max_tokens=1, n=12)
    async with AsyncEngine(config()) as engine:
        async for _ in engine.generate("Answer:", wanted):
            pass
    assert sum(made) < 12


async def test_rows_that_take_too_much_memory_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = iter(range(0, 1 << 60, 1 << 30))  # a gigabyte at each look
    monkeypatch.setattr(rows, "_resident", lambda: next(resident))
    monkeypatch.setattr(rows, "SLOW_SECONDS", -1.0)
    monkeypatch.setattr(rows, "BYTES_PER_SECOND", 1 << 50)
    async with AsyncEngine(config()) as engine:
        others = asyncio.create_task(reply(engine, SamplingParams(max_tokens=40)))
        with pytest.raises(GrammarLimitError, match="of memory"):
            await reply(engine, params(way=StructuredOutputs(regex="[a-z]{900}"), max_tokens=300))
        assert (await others).finish_reason == "length"


async def test_tokens_that_take_long_to_read_are_read_beside_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lanes: list[bool] = []
    unread: list[int] = []
    start = MaskLanes.start

    def noted(self: MaskLanes, jobs: Any, *, is_slow: bool) -> None:
        lanes.extend([is_slow] * len(jobs))
        unread.extend(len(job.unread) for job in jobs)
        start(self, jobs, is_slow=is_slow)

    monkeypatch.setattr(MaskLanes, "start", noted)
    monkeypatch.setattr(rows, "READ_SECONDS", 0.0)
    monkeypatch.setattr(rows, "TOKEN_SECONDS", 0.0)
    monkeypatch.setattr(rows, "PAUSE_FROM", 0.0)
    way = StructuredOutputs(regex="[a-z]{30}")
    async with AsyncEngine(config()) as engine:
        assert len((await reply(engine, params(way=way, max_tokens=40))).text) == 30
        assert lanes[:2] == [False, True]
        assert False not in lanes[1:]
        assert sum(unread) > 1
        # Neither does a step read for another request with that grammar, or for one that resumes.
        lanes.clear()
        assert len((await reply(engine, params(7, way=way, max_tokens=40))).text) == 30
        assert lanes
        assert False not in lanes


async def test_no_step_waits_for_masks_while_earlier_ones_are_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    waited: list[float] = []
    fill, wait = MaskLanes._fill, rows.wait_for

    def stands_still(self: MaskLanes, job: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result(60)
        return fill(self, job)

    def noted(jobs: Any, seconds: float) -> None:
        waited.append(seconds)
        wait(jobs, seconds)

    monkeypatch.setattr(MaskLanes, "_fill", stands_still)
    monkeypatch.setattr(rows, "wait_for", noted)
    async with AsyncEngine(config()) as engine:
        wanted = params(way=StructuredOutputs(regex="[a-z]{9}"), max_tokens=30)
        bound = asyncio.create_task(reply(engine, wanted))
        await begun.wait()
        other = SamplingParams(max_tokens=30, ignore_eos=True)
        assert len((await reply(engine, other)).token_ids) == 30
        assert waited.count(rows.STEP_SECONDS) < 15 < waited.count(0.0)
        may_go_on.set()
        assert len((await bound).text) == 9
