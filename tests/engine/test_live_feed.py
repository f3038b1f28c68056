"""Who looks gets frames; who sleeps, a snapshot; and while nobody looks there is nothing."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig, ShadowConfig
from aioserve.engine import live_feed as gallery
from aioserve.engine import live_feed as onlooker
from aioserve.engine.live_feed import AWAY_SECONDS, NUM_KEPT, shown_id
from aioserve.engine.operations import ShowSteps
from aioserve.engine.operations.command import Seen
from aioserve.errors import EngineDeadError, RequestError
from aioserve.lab import VirtualClockEventLoop
from tests.foreign_policy import FOREIGN

CONFIG = EngineConfig(
    runner=RunnerConfig(runner="simulated"),
    scheduler=SchedulerConfig(policy="chunked_prefill"),
    shadow=ShadowConfig(shadow_policy="hrrn"),
)


def run(
    main: Callable[[AsyncEngine], Coroutine[Any, Any, None]],
    scheduler: SchedulerConfig = CONFIG.scheduler,
) -> None:
    config = msgspec.structs.replace(CONFIG, scheduler=scheduler)

    async def with_engine() -> None:
        async with AsyncEngine(config) as engine:
            await main(engine)

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        runner.run(with_engine())


def watchers_of(engine: AsyncEngine) -> list[str]:
    snapshot = engine.inspect()
    assert snapshot is not None
    return snapshot.watchers


async def look(engine: AsyncEngine, after: int) -> tuple[int, list[Any]]:
    seen: Seen = await engine.ask(ShowSteps(after))
    return seen.number, [json.loads(frame) for frame in seen.frames]


async def generate(engine: AsyncEngine, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    async for _ in engine.generate([3] * 50, params, request_id="a"):
        pass


def test_it_stands_before_the_scheduler_while_somebody_looks_and_not_before_or_after() -> None:
    async def main(engine: AsyncEngine) -> None:
        before = watchers_of(engine)
        assert engine.metrics.latencies is None
        number, [snapshot] = await look(engine, 0)
        assert snapshot["kind"] == "snapshot"
        assert watchers_of(engine)[-1] == "FeedObserver"
        await asyncio.sleep(AWAY_SECONDS / 2)
        await look(engine, number)
        await asyncio.sleep(AWAY_SECONDS * 0.8)  # asked again in time
        assert watchers_of(engine)[-1] == "FeedObserver"
        await asyncio.sleep(AWAY_SECONDS)
        assert watchers_of(engine) == before
        assert engine.metrics.latencies is None

    run(main)


def test_frames_tell_what_came_after_the_snapshot() -> None:
    async def main(engine: AsyncEngine) -> None:
        number, [snapshot] = await look(engine, 0)
        assert snapshot["requests"] == []
        assert snapshot["about"]["policy"] == "chunked_prefill"
        assert snapshot["about"]["policies"]["fcfs"]
        assert snapshot["shadow"]["policy"] == "hrrn"
        task = asyncio.create_task(generate(engine, 40))
        ended: list[Any] = []
        came, steps, output, gaps = [], 0, 0, 0
        while not ended:
            number, frames = await look(engine, number)
            for frame in frames:
                assert frame["kind"] == "frame"
                came += frame["events"]["came"]
                steps += len(frame["events"]["planned"])
                ended += frame["events"]["ended"]
                gaps += sum(count for _, count in frame["gauges"]["gaps"])
                output = frame["gauges"]["num_output_tokens"]
                limits = {frame["gauges"]["step_limit"]}
        await task
        assert came[0][1] == shown_id("a")
        assert steps == 40
        assert limits == {512}  # the policy's chunk, which binds before the server's
        assert ended[0][2:] == ["length", 40]
        assert output == 40
        assert gaps == 39

    run(main)


def test_a_snapshot_in_the_middle_and_the_frames_after_it_tell_each_step_once() -> None:
    async def main(engine: AsyncEngine) -> None:
        await look(engine, 0)
        task = asyncio.create_task(generate(engine, 60))
        await asyncio.sleep(0.1)
        number, [snapshot] = await look(engine, 0)  # another tab
        [stands] = snapshot["requests"]
        assert stands[0][1] == shown_id("a")
        assert stands[1] == "running"
        assert snapshot["rows"] == [stands[0][0]]
        have = stands[4]
        assert 0 < have < 60
        await task
        await asyncio.sleep(0.2)  # the last frame
        _, frames = await look(engine, number)
        assert have + sum(len(frame["events"]["back"]) for frame in frames) == 60

    run(main)


def test_who_was_away_for_a_while_gets_the_frames_and_for_long_a_snapshot() -> None:
    async def main(engine: AsyncEngine) -> None:
        start, _ = await look(engine, 0)
        number = start
        task = asyncio.create_task(generate(engine, 2000))
        for _ in range(NUM_KEPT // 2):
            number, _ = await look(engine, number)
        _, frames = await look(engine, start)
        assert [frame["number"] for frame in frames] == list(range(start + 1, number + 1))
        for _ in range(NUM_KEPT):
            number, _ = await look(engine, number)
        _, [snapshot] = await look(engine, start)
        assert snapshot["kind"] == "snapshot"
        _, [snapshot] = await look(engine, 10**9)  # nobody's number
        assert snapshot["kind"] == "snapshot"
        task.cancel()

    run(main)


def test_an_idle_engine_tells_little() -> None:
    async def main(engine: AsyncEngine) -> None:
        loop = asyncio.get_running_loop()
        number, _ = await look(engine, 0)
        began = loop.time()
        for _ in range(5):
            number, _ = await look(engine, number)
        assert loop.time() - began >= 4

    run(main)


def test_a_switch_is_told_and_watched_on() -> None:
    async def main(engine: AsyncEngine) -> None:
        number, _ = await look(engine, 0)
        engine.switch_policy("fcfs")
        _, [frame] = await look(engine, number)
        assert frame["events"]["switched"][0][1:] == ["fcfs", {}]
        assert watchers_of(engine)[-1] == "FeedObserver"
        _, [snapshot] = await look(engine, 0)
        assert snapshot["about"]["policy"] == "fcfs"

    run(main)


def test_who_looks_at_the_end_is_told_so() -> None:
    async def main(engine: AsyncEngine) -> None:
        number, _ = await look(engine, 0)
        waiting = asyncio.create_task(look(engine, number))
        await asyncio.sleep(0)
        await engine.shutdown()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await waiting
        with pytest.raises(EngineDeadError):
            await look(engine, number)

    run(main)


def test_who_comes_while_the_engine_ends_does_not_begin_to_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_ended = threading.Event()
    monkeypatch.setattr(gallery, "describe_policies", lambda: {"late": str(has_ended.wait(60))})

    async def main(engine: AsyncEngine) -> None:
        looking = asyncio.create_task(look(engine, 0))
        await asyncio.sleep(0)
        await engine.shutdown()
        has_ended.set()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await looking
        assert engine.metrics.latencies is None

    run(main)


def test_a_scheduler_that_is_no_policy_of_ours_is_refused_in_words() -> None:
    async def main(engine: AsyncEngine) -> None:
        assert watchers_of(engine) == ["ShadowTurns"]
        with pytest.raises(RequestError, match="ForeignScheduler does not derive from Base"):
            await look(engine, 0)

    run(main, SchedulerConfig(policy=FOREIGN))


def test_what_fails_while_it_watches_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(engine: AsyncEngine) -> None:
        number, _ = await look(engine, 0)
        monkeypatch.setattr(onlooker, "Planned", lambda *args: 1 / 0)
        await generate(engine, 3)
        with pytest.raises(RequestError, match="ZeroDivisionError"):
            await look(engine, number)

    run(main)
