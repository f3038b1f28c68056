"""The same tokens as `transformers`, whatever the policy, the chunks, the cache and the pressure.

Sixty prompts of 1 to 3,000 tokens, sent together with staggered arrivals, greedy, in float32.
"""

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import aioserve
from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.outputs import SchedulerStats
from tests.models import make_model
from tests.slow import mostly_slow
from tests.variants import DTYPE

VOCAB_SIZE = 2048
MAX_TOKENS = 100
MAX_MODEL_LEN = 3130
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def make_prompts() -> list[list[int]]:
    """60 prompts: lengths from 1 to 3,000, a third of them sharing beginnings."""
    rng = random.Random(7)
    lengths = [1, 2, 3, 15, 16, 17, 31, 32, 33, 100, 700, 3000]
    lengths += [rng.randint(100, 260) for _ in range(60 - len(lengths))]
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(200)]
    prompts = []
    for i, length in enumerate(lengths):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        prompts.append((shared[: length // 2] + own)[:length] if i % 3 == 0 else own)
    rng.shuffle(prompts)
    return prompts


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference")
    make_model(
        "llama",
        path,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
        num_hidden_layers=2,
    )
    for name in TOKENIZER_FILES:
        shutil.copy(Path(aioserve.__file__).parent / "model_source" / "embedded" / name, path)
    return path


@pytest.fixture(scope="module")
def reference(model_path: Path) -> list[Any]:
    """What `transformers` generates for each prompt alone."""
    from aioserve.runner.loader import named_dtype
    from tests.greedy import GreedyReference

    model = GreedyReference(model_path, named_dtype(DTYPE))
    return [model.tokens(prompt, MAX_TOKENS) for prompt in make_prompts()]


async def serve_all(
    config: EngineConfig, prompts: list[list[int]]
) -> tuple[list[list[int]], SchedulerStats]:
    """All prompts, one after every second token that comes; their tokens, the scheduler's counts.

    By tokens, not by time: how many run together does not depend on the machine.
    """
    async with AsyncEngine(config) as engine:
        num_tokens, has_come = 0, asyncio.Condition()

        async def one(number: int, prompt: list[int]) -> list[int]:
            nonlocal num_tokens
            async with has_come:
                await has_come.wait_for(lambda: num_tokens >= 2 * number)
            params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
            received = []
            async for output in engine.generate(prompt, params, priority=number % 3):
                received += output.token_ids
                async with has_come:
                    num_tokens += len(output.token_ids)
                    has_come.notify_all()
            return received

        tokens = await asyncio.gather(*(one(i, p) for i, p in enumerate(prompts)))
        stats = engine.get_stats()
        assert stats is not None
        return tokens, stats


POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("fcfs", {}),
    ("priority", {}),
    ("chunked_prefill", {"chunk_size": 512}),
    ("chunked_prefill", {"chunk_size": 16}),
]


# KV slots, in tokens: for everybody; for the longest request and little beside it; for two or
# three requests of middle length (what does not fit is left out).
POOLS = {"roomy": 32_000, "tight": 3_100, "starved": 500}


@pytest.mark.parametrize("pool", mostly_slow(POOLS, but=["tight"]))
@pytest.mark.parametrize(
    "prefix_caching", mostly_slow([False, True], but=[True]), ids=["uncached", "cached"]
)
@pytest.mark.parametrize(("policy", "options"), mostly_slow(POLICIES, but=[POLICIES[3]]), ids=str)
def test_greedy_tokens_equal_those_of_transformers(
    model_path: Path,
    reference: list[Any],
    policy: str,
    options: dict[str, Any],
    prefix_caching: bool,
    pool: str,
) -> None:
    block_size = 16 if pool == "roomy" else 2
    config = EngineConfig(
        model=ModelConfig(model=str(model_path), dtype=DTYPE),
        cache=CacheConfig(
            enable_prefix_caching=prefix_caching,
            watermark=0,
            block_size=block_size,
            num_kv_blocks=POOLS[pool] // block_size,
        ),
        scheduler=SchedulerConfig(policy=policy, options=options, max_num_seqs=64),
        runner=RunnerConfig(threads=1),
    )
    cases = [
        (prompt, expected)
        for prompt, expected in zip(make_prompts(), reference, strict=True)
        if len(prompt) + MAX_TOKENS <= POOLS[pool]
    ]
    assert len(cases) > 40
    tokens, stats = asyncio.run(serve_all(config, [prompt for prompt, _ in cases]))
    assert tokens == [expected for _, expected in cases]
    if pool == "starved":
        assert stats.num_preemptions >= 24
    if prefix_caching:
        assert stats.num_prefix_hit_tokens > 0
