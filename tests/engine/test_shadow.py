"""The shadow: what it says a policy would do is what that policy does; and it disturbs nobody."""

import asyncio
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from aioserve.policies.fcfs import FCFSScheduler

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig, ShadowConfig
from aioserve.engine.metrics import Histogram
from aioserve.engine.prompt import Encoded
from aioserve.errors import ConfigError
from aioserve.lab import VirtualClockEventLoop
from aioserve.request import EncoderInput, Request
from aioserve.scheduler import SchedulerOutput


@pytest.fixture(autouse=True)
def _a_stopwatch_that_no_machine_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the shadow costs is told by how often it looks: 20 us each time."""
    ticks = itertools.count()
    stopwatch = SimpleNamespace(perf_counter=lambda: 20e-6 * next(ticks))
    monkeypatch.setattr("aioserve.lab.shadow.time", stopwatch)


async def serve_many(engine: AsyncEngine) -> list[list[int]]:
    """Short requests with long ones between them, then quiet."""

    async def one(i: int) -> list[int]:
        await asyncio.sleep(0.06 * i)
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        length = 3500 if i % 10 == 5 else 60
        outputs = engine.generate([i + 3] * length, params)
        return [token_id async for output in outputs for token_id in output.token_ids]

    tokens = await asyncio.gather(*(one(i) for i in range(60)))
    await asyncio.sleep(30)  # the shadow lives some seconds behind
    return tokens


def run(
    policy: str,
    shadow: str | None = None,
    main: Callable[[AsyncEngine], Any] = serve_many,
    share: float = 1.0,
) -> tuple[Any, AsyncEngine]:
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated"), scheduler=SchedulerConfig(policy=policy)
    )
    if shadow is not None:
        settings = ShadowConfig(shadow_policy=shadow, shadow_max_share=share)
        config = msgspec.structs.replace(config, shadow=settings)

    async def with_engine() -> tuple[Any, AsyncEngine]:
        async with AsyncEngine(config) as engine:
            return await main(engine), engine

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        return runner.run(with_engine())


def mean(histogram: Histogram) -> float:
    return histogram.total / sum(histogram.counts)


@pytest.mark.parametrize(
    ("live", "shadow"), [("fcfs", "chunked_prefill"), ("chunked_prefill", "fcfs")]
)
def test_the_shadow_foretells_what_the_policy_does_when_it_is_live(live: str, shadow: str) -> None:
    _, watched = run(live, shadow)
    _, real = run(shadow)
    foretold, truth = watched.metrics.shadow, real.metrics
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        said, happened = getattr(foretold, name), getattr(truth, name)
        assert sum(said.counts) == sum(happened.counts), name
        # The step-time model is learned from the live steps alone, so it is not exact.
        assert mean(said) == pytest.approx(mean(happened), rel=0.15), name
    # And it is not just the live policy's own numbers: these two differ.
    assert mean(watched.metrics.time_to_first_token) != pytest.approx(
        mean(truth.time_to_first_token), rel=0.15
    )


def test_the_shadow_changes_neither_tokens_nor_times() -> None:
    tokens, plain = run("chunked_prefill")
    watched_tokens, watched = run("chunked_prefill", "fcfs")
    assert watched_tokens == tokens
    for name in ("time_to_first_token", "inter_token_latency", "request_latency"):
        assert getattr(watched.metrics, name).counts == getattr(plain.metrics, name).counts


def test_nothing_is_left_in_the_shadow_when_all_is_quiet() -> None:
    async def main(engine: AsyncEngine) -> None:
        await serve_many(engine)
        async for _ in engine.generate([1] * 50, SamplingParams(max_tokens=500, ignore_eos=True)):
            break  # its client leaves
        await asyncio.sleep(30)

    _, engine = run("chunked_prefill", "priority", main)
    shadow = engine.metrics.shadow.shadow
    assert shadow is not None
    assert not shadow.has_work
    stats = shadow.scheduler.make_stats()
    assert stats.num_used_kv_blocks == stats.num_running_reqs == stats.num_waiting_reqs == 0
    text = engine.metrics.render().decode()
    assert "aioserve_shadow_time_to_first_token_seconds_count 61.0" in text
    assert "aioserve_shadow_failed 0.0" in text


def test_a_shadow_without_time_gives_up_instead_of_growing() -> None:
    async def main(engine: AsyncEngine) -> int:
        for _ in range(3):
            await serve_many(engine)
        shadow = engine.metrics.shadow.shadow
        assert shadow is not None
        return len(shadow._events) + len(shadow._live)

    num_remembered, engine = run("chunked_prefill", "fcfs", main, share=1e-9)
    shadow = engine.metrics.shadow.shadow
    assert shadow is not None
    assert num_remembered <= 120  # of 180
    assert shadow.stats.num_resets > 0
    assert shadow.stats.cost_seconds < 0.01


class Fails(FCFSScheduler):
    def schedule(self) -> SchedulerOutput:
        if len(self.waiting) + len(self.running) > 1:
            raise ValueError("no idea")
        return super().schedule()


def test_a_shadow_policy_that_fails_is_switched_off_and_nobody_notices() -> None:
    tokens, engine = run("chunked_prefill", f"{__name__}:Fails")
    assert tokens == run("chunked_prefill")[0]
    assert "aioserve_shadow_failed 1.0" in engine.metrics.render().decode()


class SetsTheClock(FCFSScheduler):
    sets_frequency = True


def test_a_shadow_policy_that_cannot_work_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'fcsf'"):
        run("fcfs", "fcsf")
    with pytest.raises(ConfigError, match=r"shadow policy '.*' sets the card's clock"):
        run("fcfs", f"{__name__}:SetsTheClock")


def test_the_shadow_plans_images_and_keeps_none() -> None:
    """Their arrays are the live request's: a shadow that lives longer would hold them in memory."""
    seen: list[EncoderInput] = []

    async def main(engine: AsyncEngine) -> None:
        shadow = engine.metrics.shadow.shadow
        assert shadow is not None
        add_request = shadow.scheduler.add_request

        def note(request: Request) -> None:
            seen.extend(request.encoder_inputs)
            add_request(request)

        shadow.scheduler.add_request = note  # type: ignore[method-assign]
        image = EncoderInput(2, 30, "cat", {"pixels": np.zeros(9)})
        prompt = Encoded([7] * 60, [image])
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True)):
            pass
        await asyncio.sleep(30)

    run("fcfs", "chunked_prefill", main)
    assert [(item.content_hash, item.arrays) for item in seen] == [("cat", None)]
