"""`AsyncEngine.inspect` says what an engine is doing, and nothing of it changes afterwards."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from aioserve.policies.fcfs import FCFSScheduler

from aioserve import AsyncEngine, EngineConfig, EngineSnapshot, SamplingParams
from aioserve.config import (
    CacheConfig,
    RunnerConfig,
    SchedulerConfig,
    ShadowConfig,
)
from aioserve.engine.operations import ShowSteps
from aioserve.kv_cache import WindowSpec
from aioserve.lab import VirtualClockEventLoop
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.interface import RunnerInfo
from aioserve.runner.simulated import SimulatedRunner
from aioserve.scheduler import SchedulerOutput
from tests.foreign_policy import FOREIGN
from tests.kit import run

LONG = SamplingParams(max_tokens=1000, ignore_eos=True)
STEP_SECONDS = 0.01


def make_config(policy: str = "fcfs", **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(num_kv_blocks=100, block_size=16),
        scheduler=SchedulerConfig(policy=policy, **scheduler),
        runner=RunnerConfig(
            runner="simulated",
            step_base_ms=1000 * STEP_SECONDS,
            step_prefill_token_us=0,
            step_decode_us=0,
        ),
    )


def look(engine: AsyncEngine) -> EngineSnapshot:
    snapshot = engine.inspect()
    assert snapshot is not None
    return snapshot


def test_there_is_nothing_to_look_at_before_the_start_and_after_the_end() -> None:
    async def main() -> None:
        engine = AsyncEngine(make_config())
        assert engine.inspect() is None
        await engine.start()
        assert engine.inspect() is not None
        await engine.shutdown()
        assert engine.inspect() is None

    asyncio.run(main())


def test_an_engine_without_requests_holds_nothing() -> None:
    async def main(engine: AsyncEngine) -> None:
        snapshot = look(engine)
        assert (snapshot.state, snapshot.policy) == ("running", "fcfs")
        assert snapshot.policy_class == "FCFSScheduler"
        assert not snapshot.is_fallback
        assert (snapshot.num_running, snapshot.num_waiting, snapshot.num_arriving) == (0, 0, 0)
        assert snapshot.requests == snapshot.reader_ids == snapshot.ids_in_use == []
        assert snapshot.steps_in_flight == snapshot.watchers == []
        assert snapshot.cache is not None
        assert (snapshot.cache.num_used_blocks, snapshot.cache.num_free_blocks) == (0, 100)

    run(main, make_config())


def test_each_request_is_told_with_what_it_holds_and_why_it_waits() -> None:
    async def main(engine: AsyncEngine) -> None:
        first = await engine.add_request([5] * 40, LONG, request_id="a", user="ann", priority=3)
        await engine.add_request([6] * 20, LONG, request_id="b")
        for _ in range(4):
            await anext(first)
        snapshot = look(engine)
        assert (snapshot.num_running, snapshot.num_waiting) == (1, 1)
        a, b = snapshot.requests
        assert (a.request_id, a.status, a.wait_reason) == ("a", "running", None)
        assert (a.user, a.priority, a.num_preemptions) == ("ann", 3, 0)
        assert (a.num_prompt_tokens, a.num_output_tokens) == (40, 4)
        assert a.num_computed_tokens in (43, 44)  # the step that computes the next one is begun
        assert a.num_kv_blocks == 3
        assert (b.request_id, b.status, b.wait_reason) == ("b", "waiting", "seats")
        assert (b.num_computed_tokens, b.num_output_tokens, b.num_kv_blocks) == (0, 0, 0)
        assert a.age == b.age == pytest.approx(4 * STEP_SECONDS, rel=0.1)
        assert a.has_reader
        assert b.has_reader
        assert snapshot.reader_ids == snapshot.ids_in_use == ["a", "b"]
        cache = snapshot.cache
        assert cache is not None
        assert (cache.num_blocks, cache.num_used_blocks) == (100, 3)
        assert cache.num_cached_blocks == 0
        assert cache.num_free_blocks == 97
        assert cache.num_state_slots is cache.num_window_blocks is None

    run(main, make_config(max_num_seqs=1))


def test_blocks_of_a_request_that_has_ended_are_cached_or_free() -> None:
    async def main(engine: AsyncEngine) -> None:
        stream = await engine.add_request([5] * 40, LONG)
        await anext(stream)
        stream.close()
        await asyncio.sleep(1)
        cache = look(engine).cache
        assert cache is not None
        assert cache.num_cached_blocks == 2  # full ones
        assert (cache.num_used_blocks, cache.num_free_blocks) == (0, 98)

    run(main, make_config())


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_in_flight_are_told_with_their_age_and_their_tokens(depth: int) -> None:
    async def main(engine: AsyncEngine) -> None:
        await engine.add_request([5] * 40, LONG, request_id="a")
        await asyncio.sleep(STEP_SECONDS * 0.75)
        steps = look(engine).steps_in_flight
        assert [step.step_id for step in steps] == [1, 2][:depth]
        assert [step.num_tokens for step in steps] == [{"a": 40}, {"a": 1}][:depth]
        assert [step.age for step in steps] == [pytest.approx(STEP_SECONDS * 0.75)] * depth

    run(main, make_config(pipeline_depth=depth))


class OfStates(SimulatedRunner):
    """As of a model with states."""

    async def load(self) -> RunnerInfo:
        return msgspec.structs.replace(self.info, num_state_slots=8)


class OfWindows(SimulatedRunner):
    """As of a model with a sliding window of two blocks."""

    async def load(self) -> RunnerInfo:
        windows = WindowSpec(num_tokens=32, num_blocks=50, max_chunk=512, max_drafts=0)
        return msgspec.structs.replace(self.info, windows=windows)


@pytest.mark.parametrize(
    ("kind", "slots", "num_window_blocks"),
    [
        (SimulatedRunner, (None, None), None),
        (OfStates, (8, 1), None),
        (OfWindows, (None, None), 50),
    ],
)
def test_states_and_windows_are_told_where_the_model_has_them(
    kind: type[SimulatedRunner], slots: tuple[int | None, int | None], num_window_blocks: int | None
) -> None:
    async def main() -> None:
        config = make_config()
        async with AsyncEngine(config, runner=kind(config, ModelInfo(config.model))) as engine:
            await anext(await engine.add_request([5] * 40, LONG))
            cache = look(engine).cache
            assert cache is not None
            assert (cache.num_state_slots, cache.num_used_state_slots) == slots
            assert cache.num_window_blocks == num_window_blocks
            assert bool(cache.num_used_window_blocks) == (num_window_blocks is not None)

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        runner.run(main())


class Stuck(SimulatedRunner):
    """Its steps never come back."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> asyncio.Future[ModelRunnerOutput]:
        return asyncio.get_running_loop().create_future()


def test_a_runner_that_is_stuck_is_seen_by_the_age_of_its_step() -> None:
    async def main() -> None:
        config = make_config()
        engine = AsyncEngine(config, runner=Stuck(config, ModelInfo(config.model)))
        await engine.start()
        await engine.add_request([5] * 40, LONG)
        await asyncio.sleep(3600)
        [step] = look(engine).steps_in_flight
        assert step.age == pytest.approx(3600)
        await engine.shutdown()

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        runner.run(main())


class ServesNone(FCFSScheduler):
    """Holds all requests back."""

    def schedule(self) -> SchedulerOutput:
        return self.new_step().output()


def test_a_policy_that_serves_no_request_is_seen_by_how_long_it_has_stalled() -> None:
    async def main(engine: AsyncEngine) -> None:
        await engine.add_request([5] * 40, LONG)
        await asyncio.sleep(30)
        snapshot = look(engine)
        assert snapshot.stalled_seconds == pytest.approx(30, abs=0.1)
        assert [request.wait_reason for request in snapshot.requests] == ["policy"]

    run(main, make_config(f"{__name__}:ServesNone", stall_timeout=60))


class AlwaysRaises(FCFSScheduler):
    """Plans nothing at all."""

    def schedule(self) -> SchedulerOutput:
        raise ValueError("no idea")


def test_the_fallback_is_told_while_it_plans_in_the_place_of_the_policy() -> None:
    async def main(engine: AsyncEngine) -> None:
        async for _ in engine.generate([5], SamplingParams(max_tokens=3)):
            pass
        snapshot = look(engine)
        assert snapshot.is_fallback
        assert snapshot.policy_class != "AlwaysRaises"
        engine.switch_policy("chunked_prefill")
        snapshot = look(engine)
        assert not snapshot.is_fallback
        assert snapshot.policy == "chunked_prefill"
        assert snapshot.policy_class == "ChunkedPrefillScheduler"

    run(main, make_config(f"{__name__}:AlwaysRaises"))


def test_a_pause_and_a_sleep_are_told() -> None:
    async def main(engine: AsyncEngine) -> None:
        stream = await engine.add_request([5] * 40, LONG)
        await anext(stream)
        await engine.pause()
        snapshot = look(engine)
        assert snapshot.state == "paused"
        assert snapshot.steps_in_flight == []
        assert [request.status for request in snapshot.requests] == ["running"]
        await engine.sleep()
        snapshot = look(engine)
        assert snapshot.state == "asleep"
        assert [request.status for request in snapshot.requests] == ["preempted"]
        assert [request.num_kv_blocks for request in snapshot.requests] == [0]

    run(main, make_config())


def test_every_sample_is_told_and_the_id_that_they_share_is_taken_as_well() -> None:
    async def main(engine: AsyncEngine) -> None:
        params = msgspec.structs.replace(LONG, n=2)
        await engine.add_request([5] * 40, params, request_id="x")
        snapshot = look(engine)
        assert [request.request_id for request in snapshot.requests] == ["x-0", "x-1"]
        assert snapshot.reader_ids == ["x-0", "x-1"]
        assert snapshot.ids_in_use == ["x", "x-0", "x-1"]

    run(main, make_config())


async def test_a_prompt_that_is_being_tokenized_is_told_as_arriving() -> None:
    async with AsyncEngine(make_config()) as engine:
        text = "word " * 800  # long enough for the thread
        adding = asyncio.create_task(engine.add_request(text, LONG, request_id="a"))
        await asyncio.sleep(0)
        snapshot = look(engine)
        assert (snapshot.num_arriving, snapshot.arriving_ids) == (1, ["a"])
        assert snapshot.num_arriving_tokens > 100
        assert snapshot.requests == []
        await adding
        snapshot = look(engine)
        assert (snapshot.num_arriving, snapshot.num_arriving_tokens) == (0, 0)
        assert snapshot.arriving_ids == []
        assert [request.request_id for request in snapshot.requests] == ["a"]


def test_what_stands_between_engine_and_policy_is_named() -> None:
    async def main(engine: AsyncEngine) -> None:
        assert look(engine).watchers == ["ShadowTurns"]
        await engine.ask(ShowSteps(0))
        assert look(engine).watchers == ["ShadowTurns", "FeedObserver"]
        assert look(engine).policy_class == "FCFSScheduler"

    run(main, msgspec.structs.replace(make_config(), shadow=ShadowConfig(shadow_policy="hrrn")))


def test_a_snapshot_stays_as_it_was_taken_and_can_be_written_as_json() -> None:
    async def main(engine: AsyncEngine) -> None:
        stream = await engine.add_request([5] * 40, LONG, request_id="a")
        await anext(stream)
        snapshot = look(engine)
        before = msgspec.json.encode(snapshot)
        await anext(stream)
        stream.close()
        assert msgspec.json.encode(snapshot) == before
        assert msgspec.json.decode(before, type=EngineSnapshot) == snapshot
        assert json.loads(before)["requests"][0]["request_id"] == "a"
        with pytest.raises(AttributeError):
            snapshot.policy = "other"  # type: ignore[misc]

    run(main, make_config())


def test_of_a_policy_with_the_interface_alone_it_tells_what_that_tells() -> None:
    async def main(engine: AsyncEngine) -> None:
        first = await engine.add_request([5] * 40, LONG, request_id="a", user="ann", priority=3)
        await engine.add_request([6] * 20, LONG, request_id="b")
        await anext(first)
        snapshot = look(engine)
        assert (snapshot.policy, snapshot.policy_class) == (FOREIGN, "ForeignScheduler")
        assert (snapshot.num_running, snapshot.num_waiting) == (1, 1)
        a, b = snapshot.requests
        assert (a.request_id, a.user, a.priority, a.num_prompt_tokens) == ("a", "ann", 3, 40)
        assert (b.request_id, b.num_prompt_tokens) == ("b", 20)
        assert a.age == pytest.approx(STEP_SECONDS, rel=0.1)
        for request in snapshot.requests:
            assert request.has_reader
            assert request.status is request.wait_reason is None
            assert request.num_computed_tokens is request.num_output_tokens is None
            assert request.num_kv_blocks is request.num_preemptions is None
        assert snapshot.cache is None
        assert snapshot.steps_in_flight

    run(main, make_config(FOREIGN, max_num_seqs=1))


async def test_an_engine_that_has_died_can_still_be_looked_at() -> None:
    engine = AsyncEngine(make_config())
    await engine.start()
    task = next(task for task in asyncio.all_tasks() if task.get_name() == "aioserve-engine")
    task.cancel()
    await asyncio.wait([task])
    assert look(engine).requests == []
    await engine.shutdown()
