"""Models whose plans are ours, or are like no others, give the tokens of one process on two ranks.

The second rank is a thread, as in the matrix.
"""

import asyncio
import random
from pathlib import Path

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.gpu.tensor_parallel.plan import MODEL_TYPES
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu.runner import ThreadedRunner
from tests.architectures.tiny import MAX_LEN, VOCAB_SIZE, Case, make_config, make_model
from tests.matrix.places import RunnerOfThreads, loading_one_at_a_time
from tests.processes import COMPUTING_SECONDS
from tests.slow import mostly_slow

pytest.importorskip("PIL")

#: By plans of `transformers`, of experts that lie the other way round, and of attention in which
#: every rank has whole what all heads read.
THEIRS = ("llama4_text", "aria_text", "deepseek_v2", "glm4_moe_lite", "minicpm3")
FAST = ("gpt_oss", "lfm2")
_RNG = random.Random(5)
PROMPTS = [[_RNG.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (21, 1, 38, 9)]
# The loop is the subject of other tests; these load a model each.
on_uvloop = pytest.mark.asyncio(loop_factories=["uvloop"])


def settings(path: Path, num_ranks: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", skip_tokenizer_init=True),
        cache=CacheConfig(num_kv_blocks=12, block_size=8, watermark=0),  # some are preempted
        scheduler=SchedulerConfig(
            policy="chunked_prefill", options={"chunk_size": 16}, max_num_seqs=4
        ),
        runner=RunnerConfig(
            threads=num_ranks, tensor_parallel_size=num_ranks, rank_timeout=COMPUTING_SECONDS
        )
        if num_ranks > 1
        else RunnerConfig(threads=1),
    )


async def serve(runner: ThreadedRunner, config: EngineConfig) -> tuple[list[list[int]], int, int]:
    """The tokens of each prompt, how many requests were preempted, and the rank's parameters."""
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, detokenize=False)
    async with AsyncEngine(config, runner=runner) as engine:

        async def one(prompt: list[int]) -> list[int]:
            return [t async for out in engine.generate(prompt, params) for t in out.token_ids]

        found = await asyncio.gather(*map(one, PROMPTS))
        stats = engine.get_stats()
        assert stats is not None
        assert runner._executor is not None
        return list(found), stats.num_preemptions, runner._executor._model.num_parameters


@on_uvloop
@pytest.mark.parametrize("kind", mostly_slow([*sorted(MODEL_TYPES), *THEIRS], but=FAST))
async def test_two_ranks_give_the_tokens_of_one_by_these_plans(kind: str, tmp_path: Path) -> None:
    make_model(make_config(Case(kind)), tmp_path)
    alone = settings(tmp_path, 1)
    expected, num_preempted, whole = await serve(
        ThreadedRunner(alone, ModelInfo(alone.model)), alone
    )
    together = settings(tmp_path, 2)
    with loading_one_at_a_time():
        found, _, own = await serve(RunnerOfThreads(together, ModelInfo(together.model)), together)
    assert found == expected
    assert len({token for tokens in expected for token in tokens}) > 8, "it says always the same"
    assert num_preempted > 0
    tables = (VOCAB_SIZE + (MAX_LEN if kind == "opt" else 0)) * 64  # embeddings are whole
    assert (own - tables) / (whole - tables) < 0.62
