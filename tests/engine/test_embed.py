"""Embeddings through the engine: under every policy, with preemption, cache and neighbours."""

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import aioserve
from aioserve import AsyncEngine, EngineConfig, PoolingParams, SamplingParams
from aioserve.config import (
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    ShadowConfig,
)
from aioserve.engine.input_processor import PoolingValidator
from aioserve.errors import (
    ConfigError,
    EngineDeadError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
)
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from aioserve.lab.shadow import LAG_SECONDS
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import FinishReason, ModelRunnerOutput
from aioserve.runner.interface import RunnerInfo
from aioserve.runner.simulated import SimulatedRunner
from tests.greedy import GreedyReference
from tests.kit import stats_of
from tests.policy_names import SHIPPED
from tests.slow import mostly_slow
from tests.tokenizing import share_tokenizer

EMBEDDED = Path(aioserve.__file__).parent / "model_source" / "embedded"
MEAN, LAST = PoolingParams(pooling="mean"), PoolingParams(pooling="last")
SIMULATED = EngineConfig(
    runner=RunnerConfig(runner="simulated", step_base_ms=1, step_prefill_token_us=1)
)


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 2048) for _ in range(48)]
    return [
        shared[: 16 * (i % 4)] + [rng.randrange(3, 2048) for _ in range(rng.randint(1, 60))]
        if i % 3
        else [rng.randrange(3, 2048) for _ in range(rng.randint(1, 20))]
        for i in range(24)
    ]


@pytest.fixture(scope="module")
def reference() -> GreedyReference:
    return GreedyReference(EMBEDDED, torch.float32)


@pytest.fixture(scope="module")
def expected(reference: GreedyReference) -> list[Any]:
    """By prompt: what is said after it, or its two vectors."""
    found: list[Any] = []
    for i, prompt in enumerate(make_prompts()):
        if i % 3 == 0:
            found.append(reference.tokens(prompt, 30))
        else:
            states = reference.states(prompt)
            vector = (states.mean(0) if i % 3 == 1 else states[-1]).numpy()
            found.append(vector / np.linalg.norm(vector))
    return found


@pytest.mark.parametrize(
    ("policy", "cached"),
    mostly_slow(
        itertools.product(SHIPPED, [False, True]),
        but=[("chunked_prefill", True), ("fcfs", False), ("mlfq", True)],
    ),
)
def test_vectors_and_tokens_are_those_of_transformers_under_pressure(
    policy: str, cached: bool, expected: list[Any], tmp_path: Path
) -> None:
    """And the decision log of it comes out again, step by step."""
    log = tmp_path / "decisions.log"
    config = EngineConfig(
        model=ModelConfig(dtype="float32", max_model_len=128),
        cache=CacheConfig(
            num_kv_blocks=64, block_size=2, watermark=0, enable_prefix_caching=cached
        ),
        scheduler=SchedulerConfig(
            policy=policy,
            max_num_seqs=12,
            max_num_batched_tokens=128,
            pipeline_depth=2,
            decision_log=str(log),
        ),
        runner=RunnerConfig(threads=1),
    )

    async def main() -> list[Any]:
        async with AsyncEngine(config) as engine:

            async def ask(i: int, prompt: list[int]) -> Any:
                if i % 3:
                    params = MEAN if i % 3 == 1 else LAST
                    return await engine.embed(prompt, params, user=f"u{i % 2}")
                params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
                outputs = engine.generate(prompt, params)
                return [token_id async for output in outputs for token_id in output.token_ids]

            found = await asyncio.gather(*(ask(i, p) for i, p in enumerate(make_prompts())))
            stats = stats_of(engine)
            assert stats.num_used_kv_blocks == 0
            assert stats.num_preemptions > 0
            return found

    for prompt, own, due in zip(make_prompts(), asyncio.run(main()), expected, strict=True):
        if isinstance(own, list):
            assert own == due
        else:
            np.testing.assert_allclose(own.embedding, due, atol=1e-5)
            assert own.num_prompt_tokens == len(prompt)
    assert replay(DecisionLog(log)).divergence is None


async def test_the_last_token_may_follow_a_cached_prefix_and_a_mean_needs_all_states() -> None:
    prompt = list(range(5, 45))
    config = EngineConfig(model=ModelConfig(dtype="float32"), runner=RunnerConfig(threads=1))
    async with AsyncEngine(config) as engine:
        mean = await engine.embed(prompt, MEAN)
        last = await engine.embed(prompt, LAST)
        again = await engine.embed(prompt, MEAN)
        stats = engine.get_stats()
    assert (mean.num_cached_tokens, last.num_cached_tokens, again.num_cached_tokens) == (0, 32, 0)
    np.testing.assert_array_equal(mean.embedding, again.embedding)
    assert stats is not None
    assert (stats.num_prefix_queried_tokens, stats.num_prefix_hit_tokens) == (40, 32)


async def test_it_is_counted_as_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    config = EngineConfig(runner=SIMULATED.runner, scheduler=SchedulerConfig(request_log=str(path)))
    async with AsyncEngine(config) as engine:
        await engine.embed([5] * 7, user="ann", priority=2)
        with pytest.raises(RequestTimeoutError):
            await engine.embed([5] * 7, timeout=1e-6)
        metrics = engine.metrics
        assert metrics.num_prompt_tokens == 7
        assert metrics.num_generation_tokens == 0
        assert metrics.time_to_first_token.total == metrics.inter_token_latency.total == 0
        assert metrics.finished == {FinishReason.STOP: 1, FinishReason.TIMEOUT: 1}
    [line] = map(json.loads, path.read_text().splitlines())
    del line["arrival"]
    assert line == {"prompt_tokens": 7, "output_tokens": 0, "priority": 2, "user": "ann"}


async def test_whoever_is_cancelled_or_aborted_leaves_nothing_behind() -> None:
    slow = EngineConfig(runner=RunnerConfig(runner="simulated", step_base_ms=50))
    async with AsyncEngine(slow) as engine:
        cancelled = asyncio.create_task(engine.embed([5] * 40, MEAN))
        aborted = asyncio.create_task(engine.embed([6] * 40, MEAN, request_id="x"))
        for _ in range(3):  # tokenized, queued, in the step that takes 50 ms
            await asyncio.sleep(0)
        stats = stats_of(engine)
        assert stats.num_running_reqs == 2
        cancelled.cancel()
        assert engine.abort_now("x")
        with pytest.raises(RequestAbortedError):
            await aborted
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await engine.embed([7])  # the step that carried them is back
        stats = stats_of(engine)
        assert (stats.num_running_reqs, stats.num_used_kv_blocks) == (0, 0)
        last = asyncio.create_task(engine.embed([5] * 40))
        await asyncio.sleep(0)
    with pytest.raises(EngineDeadError):
        await last


async def test_a_prompt_may_fill_the_model() -> None:
    config = EngineConfig(model=ModelConfig(max_model_len=32), runner=SIMULATED.runner)
    async with AsyncEngine(config) as engine:
        assert (await engine.embed([5] * 32)).num_prompt_tokens == 32
        with pytest.raises(RequestError, match="33 tokens, but the model's limit is 32"):
            await engine.embed([5] * 33)
        keep = PoolingParams(truncate_prompt_tokens=-1)
        assert (await engine.embed([5] * 33, keep)).num_prompt_tokens == 32
        keep = PoolingParams(truncate_prompt_tokens=3)
        assert (await engine.embed([5] * 33, keep)).num_prompt_tokens == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"pooling": "cls"}, "pooling"),
        ({"dimensions": 0}, "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        PoolingParams(**fields)
    assert caught.value.param == param


async def test_only_a_model_that_was_trained_for_it_has_its_vectors_cut(tmp_path: Path) -> None:
    async with AsyncEngine(SIMULATED) as engine:
        with pytest.raises(RequestError, match="was not trained so"):
            await engine.embed([5], PoolingParams(dimensions=64))
    for says, good, bad in (
        ({"is_matryoshka": True}, 192, 193),
        ({"matryoshka_dimensions": [64, 32]}, 32, 33),
    ):
        model = ModelConfig(model=str(copy_embedded(tmp_path, **says)))
        async with AsyncEngine(EngineConfig(model=model, runner=SIMULATED.runner)) as engine:
            output = await engine.embed([5], PoolingParams(dimensions=good))
            assert output.embedding.shape == (good,)
            np.testing.assert_allclose(np.linalg.norm(output.embedding), 1, rtol=1e-5)
            with pytest.raises(RequestError, match="dimensions must be one of"):
                await engine.embed([5], PoolingParams(dimensions=bad))


def copy_embedded(path: Path, **says: Any) -> Path:
    for file in EMBEDDED.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            (path / file.name).write_bytes(file.read_bytes())
    config = json.loads((EMBEDDED / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | says))
    share_tokenizer(path)
    return path


NORMALIZED = [{"type": f"sentence_transformers.models.{m}"} for m in ("Transformer", "Pooling")]


@pytest.mark.parametrize(
    ("says", "modules", "pools_by"),
    [
        (None, None, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, NORMALIZED, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, None, "last"),
        ({"pooling_mode": "lasttoken"}, None, "last"),
        ({"pooling_mode_cls_token": True}, None, "cls_token"),
        ({"pooling_mode": "mean"}, [*NORMALIZED, {"type": "a.Dense"}], "mean, then Dense"),
    ],
)
async def test_a_model_pools_as_it_was_saved(
    says: Any, modules: Any, pools_by: str, tmp_path: Path
) -> None:
    path = copy_embedded(tmp_path)
    if says is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(says))
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
    config = EngineConfig(model=ModelConfig(model=str(path)), runner=SIMULATED.runner)
    if pools_by in ("mean", "last"):
        door = PoolingValidator(
            ModelInfo(config.model), RunnerInfo(num_kv_blocks=1, supports_pooling=True)
        )
        assert door.complete(PoolingParams()).pooling == pools_by
    async with AsyncEngine(config) as engine:
        if pools_by in ("mean", "last"):
            await engine.embed([5])
        else:
            with pytest.raises(RequestError, match=f"pool by {pools_by}, which is not served"):
                await engine.embed([5])
            await engine.embed([5], MEAN)


async def test_a_damaged_file_about_pooling_is_told_at_the_start(tmp_path: Path) -> None:
    path = copy_embedded(tmp_path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text("{")
    engine = AsyncEngine(EngineConfig(model=ModelConfig(model=str(path)), runner=SIMULATED.runner))
    with pytest.raises(ConfigError, match="1_Pooling"):
        await engine.start()


class Unable(SimulatedRunner):
    async def load(self) -> RunnerInfo:
        return msgspec.structs.replace(await super().load(), supports_pooling=False)


class Forgetful(SimulatedRunner):
    def _compute(self, scheduler_output: Any) -> tuple[float, ModelRunnerOutput]:
        seconds, output = super()._compute(scheduler_output)
        return seconds, ModelRunnerOutput(output.req_ids, output.sampled_token_ids)


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Unable, RequestError, "gives no hidden states"),
        (Forgetful, RequestFailedError, "gave no vector"),
    ],
)
async def test_a_runner_without_vectors_says_so(
    kind: type[SimulatedRunner], error: type[Exception], words: str
) -> None:
    engine = AsyncEngine(SIMULATED)
    async with AsyncEngine(SIMULATED, runner=kind(SIMULATED, engine.model_info)) as engine:
        with pytest.raises(error, match=words):
            await engine.embed([5])
        stats = stats_of(engine)
        assert stats.num_used_kv_blocks == 0


async def test_the_shadow_sees_it_end() -> None:
    config = EngineConfig(runner=SIMULATED.runner, shadow=ShadowConfig(shadow_policy="fcfs"))
    async with AsyncEngine(config) as engine:
        await engine.embed([5] * 9)
        shadow = engine.metrics.shadow.shadow
        assert shadow is not None
        now = shadow._events[0][0] + LAG_SECONDS + 1
        for turn in range(10_000):  # a turn is short: on a busy machine one may be too short
            if not shadow.has_work:
                break
            shadow.advance(now + 0.1 * turn)
        assert not shadow.has_work
        assert not shadow.stats.is_failed
        assert engine.metrics.shadow.request_latency.total > 0
        assert engine.metrics.shadow.time_to_first_token.total == 0
