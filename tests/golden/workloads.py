"""Three loads in virtual time, each short of something else, and the decision logs that they leave.

The same for every policy. Prompts are a few numbers, repeated, so that logs deflate to little.
Knows the engine from outside; knows nothing about the lines that are made of a log.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
)
from aioserve.engine.prompt import Encoded
from aioserve.errors import AioserveError
from aioserve.features.lora.peft_directory import AdapterFiles
from aioserve.lab import VirtualClockEventLoop
from aioserve.model_source.info import ModelInfo
from aioserve.request import EncoderInput
from aioserve.runner.simulated import SimulatedRunner

MAX_MODEL_LEN = 512
BEGIN = 100.0  # of the traffic, seconds: whatever a start takes, times are the same
FIRST_TOKEN = 16
ADAPTERS = ("a", "b", "c", "d")

#: What shows the idea of a policy in requests as short as these.
OPTIONS: dict[str, dict[str, Any]] = {
    "chunked_prefill": {"chunk_size": 128},
    "deadline": {"ttft": 0.2, "tpot": 0.02, "window": 16},
    "fair": {"quantum": 64, "weights": {"u1": 2.0}},
    "latency_budget": {"target_itl": 0.012},
    "mlfq": {"quantum": 64, "starve_after": 0.5},
    "prefix_aged": {"ageing": 200.0, "window": 16},
    "hrrn": {"window": 16},
}


class Ask(NamedTuple):
    """One request, and how its client behaves."""

    arrival: float  # seconds
    prompt: list[int]
    max_tokens: int
    user: str
    priority: int = 0
    timeout: float | None = None  # seconds
    leaves_after: int | None = None  # output tokens
    salt: str = ""
    adapter: str = ""
    images: tuple[EncoderInput, ...] = ()
    resets: bool = False  # the prefix cache, when it has ended


class Load(NamedTuple):
    """Settings that are short of something, and who comes."""

    asks: Callable[[], list[Ask]]
    scheduler: dict[str, Any]
    cache: dict[str, Any]
    runner: dict[str, Any]


def chat() -> list[Ask]:
    """Conversations that share beginnings; three users, three priorities, some who leave early, and
    enough memory for most of them.
    """
    rng, asks = random.Random(1), []
    for talk in range(32):
        user, when = f"u{talk % 3}", rng.random() * 0.5
        prompt = [FIRST_TOKEN + talk % 4] * 64 + [32 + talk] * rng.randrange(4, 60)
        for turn in range(rng.randrange(2, 5)):
            num_tokens = rng.choice([1, 6, 12, 24])
            asks.append(
                Ask(
                    when,
                    list(prompt),
                    num_tokens,
                    user,
                    rng.randrange(3),
                    timeout=rng.choice([None, None, None, 0.15]),
                    leaves_after=rng.choice([None, None, None, 4]),
                    salt=rng.choice(["", "", "", "private"]),
                    resets=talk == 12 and turn == 1,
                )
            )
            prompt += [64 + turn] * (num_tokens + rng.randrange(1, 40))
            when += 0.05 + rng.random() * 0.2
    return asks


def pressed() -> list[Ask]:
    """Long prompts beside bursts of short ones, in a pool that holds three of the long ones: it is
    full again and again while replies grow.
    """
    rng, asks = random.Random(2), []
    for number in range(18):
        prompt = [FIRST_TOKEN + number] * rng.randrange(120, 400)
        asks.append(Ask(rng.random() * 0.9, prompt, rng.randrange(40, 100), "long", number % 2))
    for burst in range(4):
        for number in range(12):
            prompt = [40 + number % 5] * 32 + [64 + burst] * rng.randrange(1, 40)
            when, priority = 0.1 + 0.25 * burst, rng.randrange(3)
            asks.append(Ask(when, prompt, rng.randrange(10, 90), f"u{number % 5}", priority))
    return asks


def scarce() -> list[Ask]:
    """Adapters, slots for states, blocks of windows, and images; most tokens are drafted."""
    rng, asks = random.Random(3), []
    for number in range(70):
        prompt = [FIRST_TOKEN + number % 3] * 48 + [32 + number] * rng.randrange(1, 120)
        images: tuple[EncoderInput, ...] = ()
        if number % 5 == 0:
            name = f"image-{number % 4}"
            images = (EncoderInput(48, 24, name), EncoderInput(80, 16, f"{name}-b"))
            prompt += [20] * 64
        asks.append(
            Ask(
                rng.random() * 0.8,
                prompt,
                rng.randrange(4, 80),
                f"u{number % 4}",
                rng.randrange(2),
                timeout=rng.choice([None, None, None, 0.4]),
                adapter=rng.choice(["", "", "", *ADAPTERS]),
                images=images,
            )
        )
    return asks


LOADS = {
    "chat": Load(chat, {"max_num_seqs": 6}, {"num_kv_blocks": 96}, {}),
    "pressed": Load(
        pressed,
        {"max_num_seqs": 16, "pipeline_depth": 2},
        {"num_kv_blocks": 64, "watermark": 0.05},
        {},
    ),
    "scarce": Load(
        scarce,
        {
            "max_num_seqs": 10,
            "max_loras": 2,
            "max_encoder_tokens": 48,
            "encoder_cache_tokens": 64,
            "num_lookahead_tokens": 3,
            "victim": "least_lost",
        },
        {"num_kv_blocks": 64, "num_state_slots": 9, "num_window_blocks": 52},
        {"simulated_window": 48, "simulated_draft_tokens": 3},
    ),
}


class AdapterRunner(SimulatedRunner):
    """Takes any adapter: what is computed with it is invented anyway."""

    async def load_adapter(self, adapter_id: str, files: AdapterFiles) -> None:
        pass


def record(name: str, policy: str, path: Path, adapters: Path) -> None:
    """Leave the decision log of a load under a policy at `path`; the folder `adapters` is for files
    of adapters.
    """
    load = LOADS[name]
    with_adapters = any(ask.adapter for ask in load.asks())
    if with_adapters:
        _write_adapters(adapters)
    config = EngineConfig(
        model=ModelConfig(max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=True),
        cache=CacheConfig(**load.cache),
        runner=RunnerConfig(runner="simulated", **load.runner),
        adapters=AdapterConfig(
            lora=tuple(f"{n}={adapters / n}" for n in ADAPTERS) if with_adapters else (),
            max_cpu_loras=len(ADAPTERS),
        ),
        scheduler=SchedulerConfig(
            policy=policy,
            options=OPTIONS.get(policy, {}),
            max_num_batched_tokens=MAX_MODEL_LEN,
            decision_log=str(path),
            **load.scheduler,
        ),
    )
    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        runner.run(_serve(config, load.asks()))


async def _serve(config: EngineConfig, asks: list[Ask]) -> None:
    async with _engine(config) as engine:
        clock = asyncio.get_running_loop().time
        await asyncio.gather(*(_one(engine, clock, i, ask) for i, ask in enumerate(asks)))


@asynccontextmanager
async def _engine(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockEventLoop)
    runner = AdapterRunner(config, ModelInfo(config.model), jump_to=loop.jump_to)
    async with AsyncEngine(config, runner=runner) as engine:
        assert loop.time() < BEGIN
        yield engine


async def _one(engine: AsyncEngine, clock: Callable[[], float], number: int, ask: Ask) -> None:
    await asyncio.sleep(BEGIN + ask.arrival - clock())
    with suppress(AioserveError):  # it timed out
        async for output in engine.generate(
            Encoded(ask.prompt, list(ask.images)),
            SamplingParams(max_tokens=ask.max_tokens, temperature=0, detokenize=False),
            request_id=f"r{number:02}",
            priority=ask.priority,
            user=ask.user,
            timeout=ask.timeout,
            cache_salt=ask.salt,
            adapter=ask.adapter,
        ):
            if ask.leaves_after is not None and output.num_output_tokens >= ask.leaves_after:
                break
    if ask.resets:
        engine.reset_prefix_cache()


def _write_adapters(folder: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    for number, name in enumerate(ADAPTERS):
        path = folder / name
        path.mkdir(exist_ok=True)
        part = np.full((1, 1), number, np.float32)
        keys = [f"base_model.model.layer.lora_{side}.weight" for side in "AB"]
        save_file(dict.fromkeys(keys, part), path / "adapter_model.safetensors")
        (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
