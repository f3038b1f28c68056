"""Random traffic through the engine with the decision log on, for the tests beside this file."""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import AioserveError
from aioserve.lab import VirtualClockEventLoop
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.simulated import SimulatedRunner
from aioserve.scheduler import SchedulerOutput

MAX_MODEL_LEN = 256


def make_config(path: Path | None, **scheduler: Any) -> EngineConfig:
    """A starved pool: one and a half times what the longest request needs."""
    return EngineConfig(
        model=ModelConfig(max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(num_kv_blocks=24),
        runner=RunnerConfig(runner="simulated"),
        scheduler=SchedulerConfig(
            decision_log=None if path is None else str(path), max_num_seqs=6, **scheduler
        ),
    )


class FailingRunner(SimulatedRunner):
    """Every 60th step fails."""

    num_calls = 0

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        self.num_calls += 1
        if self.num_calls % 60 == 0 and scheduler_output.total_num_scheduled_tokens:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(RuntimeError("a planted failure"))
            return future
        return super().execute_model(scheduler_output)


async def serve(
    engine: AsyncEngine, seed: int, num_requests: int, seconds: float
) -> list[tuple[float, int, list[int]]]:
    """Prompts with common beginnings; clients that leave, time out, and ask for stop strings.

    Returns who got which tokens, and when.
    """
    received: list[tuple[float, int, list[int]]] = []
    clock = asyncio.get_running_loop().time
    rng = random.Random(seed)
    common = [rng.randrange(3, 2000) for _ in range(100)]

    async def one(number: int) -> None:
        await asyncio.sleep(rng.random() * seconds)
        prompt = common[: rng.randrange(100)]
        prompt = prompt + [rng.randrange(3, 2000) for _ in range(rng.randrange(1, 100))]
        leaves_after = rng.choice([1, 5, 1000, 1000])
        try:
            async for output in engine.generate(
                prompt,
                SamplingParams(max_tokens=rng.randrange(1, 100), stop=rng.choice(["", "e"]) or ()),
                # Used again and again: an id is free once its request has ended.
                request_id=f"r{number % 20}" if number % 3 else None,
                priority=rng.randrange(3),
                user=f"u{rng.randrange(3)}",
                timeout=rng.choice([None, None, seconds / 15]),
            ):
                received.append((clock(), number, output.token_ids))
                if output.num_output_tokens > leaves_after:
                    break
        except AioserveError:
            pass  # an id in use, a planted failure
        if number % 25 == 0:
            engine.reset_prefix_cache()

    await asyncio.gather(*(one(number) for number in range(num_requests)))
    return received


def record(
    path: Path,
    *,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = VirtualClockEventLoop,
    seed: int = 0,
    num_requests: int = 80,
    seconds: float = 0.8,
    is_failing: bool = False,
    switches: Sequence[tuple[float, str, dict[str, Any]]] = (),
    **scheduler: Any,
) -> None:
    """Serve on a loop of that kind and leave the log at `path`.

    `switches` are tried at their times: second, policy, options.
    """
    config = make_config(path, **scheduler)

    async def switch(engine: AsyncEngine) -> None:
        clock = asyncio.get_running_loop().time
        began = clock()
        for when, policy, options in switches:
            await asyncio.sleep(began + when - clock())
            with suppress(AioserveError):  # refused: that is in the log, too
                engine.switch_policy(policy, options)

    async def main() -> None:
        engine = AsyncEngine(config)
        runner = FailingRunner(config, engine.model_info) if is_failing else None
        async with AsyncEngine(config, runner=runner) as engine:
            switching = asyncio.create_task(switch(engine))
            await serve(engine, seed, num_requests, seconds)
            await switching

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
