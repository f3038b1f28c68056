"""When blocks are loaded, who waits for them, and that nobody else does."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig
from aioserve.errors import ConfigError
from aioserve.features.kv_connector import offloading
from aioserve.features.kv_connector.engine_side import (
    KVConnectorMetrics,
    check_connector,
    make_connector,
)
from aioserve.features.kv_connector.simulated import SimulatedBlocks
from aioserve.lab.simulation.run import VirtualClockEventLoop
from aioserve.model_source.info import ModelInfo
from aioserve.request import WaitReason
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler import OnlineStepTime, SchedulerInterface, SchedulerOutput
from aioserve.testing import SchedulerHarness
from aioserve.testing.toy_runner import ToyStore
from tests.testing.broken import SoundScheduler

PROMPT = [7] * 30


def returning(**settings: Any) -> SchedulerHarness:
    """A harness whose store has the blocks of `PROMPT`, and whose pool has not."""
    harness = SchedulerHarness(
        SoundScheduler, kv_connector="disk", num_blocks=20, num_host_slots=30, **settings
    )
    harness.add_request("first", PROMPT, max_tokens=2)
    harness.run_until_idle()
    harness.reset_prefix_cache()
    return harness


def test_nobody_waits_for_one_whose_blocks_are_being_read() -> None:
    harness = returning()
    harness.add_request("reading", PROMPT, max_tokens=9)
    harness.add_request("short", [1, 2], max_tokens=3)
    assert harness.scheduler.get_wait_reasons()["reading"] is WaitReason.REMOTE_KVS
    while harness.store:  # whatever the store is asked, it does not answer `reading`
        harness.plan()
        if harness.num_in_flight:
            harness.receive()
        if "short" in harness.finished:
            break
    assert "reading" not in harness.finished
    assert harness.requests["reading"] not in harness.scheduler.waiting  # type: ignore[attr-defined]
    harness.run_until_idle()
    assert harness.requests["reading"].num_external_tokens == 28


class HandsOnAFullBlock(SoundScheduler):
    """In step 3 one runs, which lists the block that step 2 filled, and gives way to the other."""

    def schedule(self) -> SchedulerOutput:
        if self.num_steps != 2:
            return super().schedule()
        step = self.new_step()
        (fills,), (takes,) = self.running, self.waiting
        step.run(fills)
        step.preempt(fills)
        step.admit(takes)
        return step.output()


def test_a_block_that_goes_to_another_before_it_is_saved_is_not_stored() -> None:
    """The store would keep what the other has written there."""
    harness = SchedulerHarness(
        HandsOnAFullBlock,
        kv_connector="disk",
        num_blocks=20,
        block_size=2,
        max_model_len=40,
        num_host_slots=40,
        pipeline_depth=1,
    )
    harness.add_request("fills", [1] * 5, max_tokens=8)
    harness.step()
    harness.step()
    harness.add_request("takes", [2] * 38, max_tokens=1)
    while harness.store:
        harness.blocks_come()
    harness.run_until_idle()


def test_a_read_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Callable[[], None]] = []

    def call_later(
        self: ToyStore, seconds: float, callback: Callable[[], None]
    ) -> Callable[[], None]:
        assert seconds == offloading.READ_TIMEOUT
        timers.append(callback)
        return lambda: timers.remove(callback)

    monkeypatch.setattr(ToyStore, "call_later", call_later)
    harness = returning()
    assert not timers  # whoever has its blocks is not timed
    harness.add_request("late", PROMPT, max_tokens=3)
    harness.store.answer()
    (time_is_up,) = timers
    time_is_up()
    for _ in range(12):
        harness.plan()
        if harness.num_in_flight:
            harness.receive()
    assert "late" in harness.finished
    assert harness.requests["late"].num_external_tokens == 0
    assert harness.connector is not None
    assert harness.connector.make_stats().num_failures == 1
    harness.add_request("next", [8] * 30, max_tokens=3)  # nobody else waits for a disk that hangs
    assert harness.scheduler.get_wait_reasons()["next"] is not WaitReason.REMOTE_KVS
    harness.run_until_idle()  # the answer comes, and no slot is lost
    harness.reset_prefix_cache()
    harness.add_request("last", PROMPT, max_tokens=3)
    harness.run_until_idle()
    assert harness.requests["last"].num_external_tokens == 28


def test_who_leaves_with_his_blocks_in_host_memory_leaves_the_slots() -> None:
    """They were read, and wait for an admission that does not come: the harness counts slots."""
    harness = returning()
    harness.add_request("gone", PROMPT, max_tokens=3)
    while harness.store:
        harness.blocks_come()
    assert harness.connector is not None
    assert harness.connector.slots.num_used_blocks
    harness.finish("gone")
    harness.run_until_idle()


def test_what_is_cheaper_to_compute_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """But once in a number of times, so that a change is noticed."""
    monkeypatch.setattr(OnlineStepTime, "is_fitted", True)  # its first guess will do
    harness = returning()
    worker = harness.connector._worker  # type: ignore[union-attr]
    worker.load_seconds, worker.num_loaded = 1e9, 1
    loaded = []
    for i in range(offloading.NUM_PASSED + 1):
        harness.kv_cache.pool.clear_index()
        name = f"q{i}"
        harness.add_request(name, PROMPT, max_tokens=1)
        found = harness.kv_cache.get_external_prefix(harness.requests[name])
        harness.run_until_idle()
        loaded.append(harness.requests[name].num_external_tokens)
    assert found.num_tokens == 28
    assert found.load_seconds > found.compute_seconds > 0
    assert sorted(loaded)[-2:] == [0, 28]


def simulated(**cache: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(max_model_len=2000, skip_tokenizer_init=True),
        cache=CacheConfig(num_kv_blocks=126, **cache),
        runner=RunnerConfig(
            runner="simulated",
            step_kv_load_token_us=1.0,
            step_kv_read_token_us=10.0,
            step_base_ms=1.0,
            step_prefill_token_us=100.0,
        ),
    )


@pytest.mark.parametrize(("kind", "expected"), [("none", 0.1), ("memory", 0.003), ("disk", 0.004)])
def test_a_simulated_conversation_comes_back_as_soon_as_its_blocks(
    kind: str, expected: float
) -> None:
    """1,000 tokens: 0.1 s to compute; 1 ms to copy, and as long for what gives way; from a
    directory they are in host memory still.
    """

    async def run() -> float:
        async with AsyncEngine(simulated(kv_connector=kind)) as engine:
            clock = asyncio.get_running_loop().time
            for turn in range(6):
                began = clock()
                prompt = [turn % 3] * 992 + [turn] * 8
                params = SamplingParams(max_tokens=1, detokenize=False)
                async for _ in engine.generate(prompt, params):
                    pass
            return clock() - began

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        seconds = runner.run(run())
    assert seconds == pytest.approx(expected, abs=0.0025)


def test_a_policy_without_the_verbs_gets_no_connector() -> None:
    config = EngineConfig(cache=CacheConfig(kv_connector="memory"))
    with pytest.raises(ConfigError, match="SchedulerInterface does not derive from BaseScheduler"):
        check_connector(config, SchedulerInterface)


def test_slots_without_bytes_get_no_directory(tmp_path: Path) -> None:
    config = EngineConfig(cache=CacheConfig(kv_connector="disk", kv_connector_path=str(tmp_path)))
    runner = SimpleNamespace(make_kv_worker=lambda size: SimulatedBlocks(size, 1024, 0.0))
    with pytest.raises(ConfigError, match="this engine's runner has no bytes that files"):
        make_connector(
            config,
            ModelInfo(config.model),
            cast(RunnerInterface, runner),
            KVConnectorMetrics(CollectorRegistry()),
        )
    assert not list(tmp_path.iterdir())
