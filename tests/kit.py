"""What tests of engines share: runs in virtual time, tokens, statistics, prompts, small models."""

import asyncio
import contextlib
import random
import reprlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.lab import VirtualClockEventLoop
from aioserve.outputs import SchedulerStats

T = TypeVar("T")


def greedy(num_tokens: int) -> SamplingParams:
    """The most likely tokens, this many whatever they are, and no text of them."""
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)


def run(main: Callable[[AsyncEngine], Coroutine[Any, Any, T]], config: EngineConfig) -> T:
    """What `main` returns of an engine that runs in virtual time."""

    async def with_engine() -> T:
        async with AsyncEngine(config) as engine:
            return await main(engine)

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        return runner.run(with_engine())


def runner_of(engine: AsyncEngine) -> Any:
    """The runner of an engine. This is the one place where tests look behind the engine's API."""
    return engine._runner


def executor_of(engine: AsyncEngine) -> Any:
    """What computes the engine's steps (None while its weights are freed): model, batch, memory."""
    return runner_of(engine)._executor


@contextlib.contextmanager
def case(*what: object) -> Iterator[None]:
    """Name one of the cases that a test loops over in the failure of what runs within."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"The case: {', '.join(map(reprlib.repr, what))}")
        raise


def stats_of(engine: AsyncEngine) -> SchedulerStats:
    """The statistics of the engine's scheduler, which keeps some."""
    stats = engine.get_stats()
    assert stats is not None
    return stats


async def tokens_of(engine: AsyncEngine, prompt: Any, params: SamplingParams) -> list[int]:
    """All tokens of the reply."""
    found: list[int] = []
    async for output in engine.generate(prompt, params):
        found += output.token_ids
    return found


def make_prompts() -> list[list[int]]:
    """Prompts of 1 to 64 tokens; the last three have 40 in common."""
    rng = random.Random(1)
    shared = [rng.randrange(3, 500) for _ in range(40)]
    prompts = [[rng.randrange(3, 500) for _ in range(n)] for n in (1, 3, 17, 45, 64)]
    return prompts + [shared + [rng.randrange(3, 500) for _ in range(n)] for n in (5, 9, 3)]


def expected_tokens(model: Path, num_tokens: int) -> list[Any]:
    """What `transformers` generates for each of `make_prompts` alone."""
    import torch

    from tests.greedy import GreedyReference

    reference = GreedyReference(model, torch.float32)
    return [reference.tokens(prompt, num_tokens) for prompt in make_prompts()]


def small_config(model: Path, **sections: Any) -> EngineConfig:
    """Four seats and prompts in pieces of 24 tokens, for models of `make_model`."""
    return EngineConfig(
        **{
            "model": ModelConfig(
                model=str(model), dtype="float32", max_model_len=128, skip_tokenizer_init=True
            ),
            "cache": CacheConfig(num_kv_blocks=64),
            "runner": RunnerConfig(threads=1),
            "scheduler": SchedulerConfig(
                policy="chunked_prefill", max_num_batched_tokens=24, max_num_seqs=4
            ),
            **sections,
        }
    )
