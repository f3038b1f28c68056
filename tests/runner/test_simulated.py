"""The simulated runner under the real engine: drafts and images change times, never tokens."""

import asyncio
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.engine.prompt import Encoded
from aioserve.lab import VirtualClockEventLoop
from aioserve.request import EncoderInput
from aioserve.runner import simulated


def generate(num_requests: int, depth: int, **runner: Any) -> tuple[list[list[int]], float]:
    """Tokens of several requests, and the virtual seconds that they took."""
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated", **runner),
        scheduler=SchedulerConfig(
            pipeline_depth=depth,
            num_lookahead_tokens=runner.get("simulated_draft_tokens", 0),
        ),
    )

    async def main() -> tuple[list[list[int]], float]:
        async with AsyncEngine(config) as engine:

            async def one(i: int) -> list[int]:
                params = SamplingParams(max_tokens=60)
                outputs = engine.generate([i + 5] * (20 + i), params)
                return [token_id async for output in outputs for token_id in output.token_ids]

            tokens = await asyncio.gather(*(one(i) for i in range(num_requests)))
            return tokens, asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as loop:
        return loop.run(main())


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_draft_tokens_change_no_token(acceptance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seconds = generate(6, 1)
    monkeypatch.setattr(simulated, "DRAFT_ACCEPTANCE", acceptance)
    tokens, drafted_seconds = generate(6, 1, simulated_draft_tokens=3)
    assert tokens == plain
    if acceptance == 1.0:
        assert drafted_seconds < seconds / 2  # four tokens a step, at the price of four
    if acceptance == 0.0:
        assert drafted_seconds >= seconds


def test_two_steps_in_flight_change_no_token() -> None:
    assert generate(6, 2)[0] == generate(6, 1)[0]
    assert generate(6, 2, simulated_draft_tokens=3)[0] == generate(6, 1)[0]


def test_images_are_encoded_before_their_tokens_and_cost_time() -> None:
    """As far as the first token."""
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        scheduler=SchedulerConfig(max_encoder_tokens=100, encoder_cache_tokens=150),
    )

    async def main() -> dict[str, float]:
        times: dict[str, float] = {}
        loop = asyncio.get_running_loop()
        async with AsyncEngine(config) as engine:
            for name, images in (("plain", []), ("image", [(10, 80, "cat")])):
                inputs = [EncoderInput(*image) for image in images]
                prompt = Encoded([7 + len(images)] * 200, inputs)
                began = loop.time()
                async for _ in engine.generate(prompt, SamplingParams(max_tokens=2)):
                    times.setdefault(name, loop.time() - began)
        return times

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        times = runner.run(main())
    assert times["image"] - times["plain"] == pytest.approx(80 * 20e-6, abs=1e-4)


def test_a_step_that_finds_the_engine_idle_takes_longer() -> None:
    def seconds_of_two_replies(idle_ms: float) -> float:
        config = EngineConfig(runner=RunnerConfig(runner="simulated", step_idle_ms=idle_ms))

        async def main() -> float:
            async with AsyncEngine(config) as engine:
                for _ in range(2):
                    await asyncio.sleep(1)
                    async for _ in engine.generate([5] * 20, SamplingParams(max_tokens=9)):
                        pass
                return asyncio.get_running_loop().time()

        with asyncio.Runner(loop_factory=VirtualClockEventLoop) as loop:
            return loop.run(main())

    waking = seconds_of_two_replies(7.0) - seconds_of_two_replies(0.0)
    assert waking == pytest.approx(2 * 0.007)  # once a reply, not once a step
