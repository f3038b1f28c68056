"""What only a card can show: that the real kernels, graphs and streams do what their stand-ins do.

`pytest -m gpu`. Head size 64 and bfloat16, so that flashinfer serves where it is installed.
"""

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from aioserve import AsyncEngine, SamplingParams
from aioserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.errors import ConfigError
from aioserve.features.lora.peft_directory import read_adapter
from aioserve.runner.batch import sampling_columns
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.adapters import ALL_LINEAR, make_adapter, merge
from tests.models import VOCAB_SIZE, make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA card"),
]
needs_flashinfer = pytest.mark.skipif(
    find_spec("flashinfer") is None, reason="flashinfer is not installed"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        "qwen3",
        tmp_path_factory.mktemp("gpu"),
        hidden_size=256,
        head_dim=64,
        intermediate_size=384,
        max_position_embeddings=4096,
    )


def settings(path: Path, depth: int = 2, dtype: str = "bfloat16", **runner: Any) -> EngineConfig:
    cache = {"kv_cache_dtype": runner.pop("kv_cache_dtype", "auto")}
    return EngineConfig(
        model=ModelConfig(model=str(path), dtype=dtype, max_model_len=4096),  # type: ignore[arg-type]
        cache=CacheConfig(num_kv_blocks=4096, **cache),
        scheduler=SchedulerConfig(max_num_seqs=64, pipeline_depth=depth),
        runner=RunnerConfig(device="cuda", **runner),
    )


def build(config: EngineConfig) -> Any:
    from aioserve.gpu.cuda.load import load_on_cuda
    from aioserve.model_source.info import ModelInfo

    return load_on_cuda(config, ModelInfo(config.model))


def load_beside(executor: Any, path: Path) -> None:
    """An adapter of the name "a", by a thread that launches nothing."""
    with ThreadPoolExecutor(1) as thread:
        adapter = thread.submit(executor.adapters.put, read_adapter(path)).result()
    executor.adapters.load("a", adapter)


def step_of(prompts: dict[str, list[int]], adapter_id: str) -> SchedulerOutput:
    """Whole prompts as one step; 256 blocks for each."""
    new = [
        NewRequestData(
            request_id=name,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling_params=SamplingParams(temperature=0, logprobs=20),
            stop_token_ids=frozenset(),
            block_ids=list(range(256 * i, 256 * i + 256)),
            num_computed_tokens=0,
            adapter_id=adapter_id,
        )
        for i, (name, prompt) in enumerate(prompts.items())
    ]
    counts = {name: len(prompt) for name, prompt in prompts.items()}
    none = CachedRequestData([], [], {})
    return SchedulerOutput(1, new, none, counts, sum(counts.values()), [], [])


def decode_of(lengths: dict[str, int]) -> SchedulerOutput:
    cached = CachedRequestData(list(lengths), list(lengths.values()), {})
    return SchedulerOutput(2, [], cached, dict.fromkeys(lengths, 1), len(lengths), [], [])


@torch.inference_mode()
def run(executor: Any, num_decodes: int, adapter_id: str = "") -> list[dict[str, dict[int, float]]]:
    """Logprobs of a prefill of three prompts, and of decodes after it, whose tokens are fixed by
    the first executor that is asked.
    """
    rng = random.Random(0)
    prompts = {
        name: [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        for name, length in (("a", 700), ("b", 1), ("c", 90))
    }
    lengths = {name: len(prompt) for name, prompt in prompts.items()}
    found = []
    for step in range(num_decodes + 1):
        output = decode_of(lengths) if step else step_of(prompts, adapter_id)
        if step:
            lengths = {name: length + 1 for name, length in lengths.items()}
        result = executor.finish(executor.launch(output))
        found.append(
            {
                name: dict(zip(entry[0].top_token_ids, entry[0].top_logprobs, strict=True))
                for name, entry in result.logprobs.items()
            }
        )
    return found


def check_close(a: list[dict[str, dict[int, float]]], b: list[Any], tolerance: float) -> None:
    """Until the greedy tokens part, as bfloat16 may make them."""
    for one, other in zip(a, b, strict=True):
        for name in one:
            best, best_other = (
                max(one[name], key=one[name].get),
                max(other[name], key=other[name].get),
            )
            common = one[name].keys() & other[name].keys()
            assert len(common) > 10
            errors = [abs(one[name][t] - other[name][t]) for t in common]
            assert max(errors) < tolerance
            if best != best_other:
                return


@torch.inference_mode()
def test_triton_draws_what_the_cpu_draws() -> None:
    from aioserve.gpu.cuda import sampler, triton_kernels

    rng = np.random.default_rng(0)
    keys = torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (2, 64)).astype(np.int32))
    words = keys.numpy().view(np.uint32).T
    expected = sampling_columns.uniform(
        sampling_columns.hash_tokens(words, np.arange(152_000, dtype=np.uint32))
    )
    assert (triton_kernels.uniforms(keys.cuda(), 152_000).cpu().numpy() == expected).all()

    logits = torch.randn(64, 152_000) * 3
    columns = sampler.DrawColumns(
        temperature=torch.tensor([0, 0.7, 1, 2] * 16),
        top_k=torch.tensor([0, 0, 40, 0, 1, 0, 100, 3] * 8, dtype=torch.int32),
        top_p=torch.tensor([1, 0.9, 1, 0.5] * 16),
        min_p_floor=torch.tensor([-float("inf"), -3.0] * 32),
        keys=keys,
        has_top_k=True,
        has_top_p=True,
    )
    on_card = sampler.DrawColumns(*(c.cuda() for c in columns[:-2]), True, True)
    found = triton_kernels.draw(logits.cuda(), on_card).cpu()
    same = (found == sampler.draw(logits, columns)).float().mean().item()
    assert same > 0.98  # log and exp may differ in the last bit, which rarely decides


@needs_flashinfer
def test_flashinfer_and_graphs_are_plain_torch_attention(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays see lengths that are far from those at capture; pages of three requests."""
    from aioserve.gpu.cuda import load

    replayed = run(build(settings(path)), 40)
    eager = run(build(settings(path, enforce_eager=True)), 40)
    fp8 = run(build(settings(path, kv_cache_dtype="fp8")), 40)
    monkeypatch.setattr(load, "find_flashinfer", lambda *_: None)
    plain = run(build(settings(path)), 40)
    check_close(replayed, plain, 0.2)
    check_close(eager, plain, 0.2)
    check_close(fp8, plain, 1.5)


def test_fused_layers_are_the_modules_of_transformers(path: Path) -> None:
    config = settings(path)
    unfused = EngineConfig(
        model=ModelConfig(model=str(path), dtype="bfloat16", max_model_len=4096, fused=False),
        cache=config.cache,
        scheduler=config.scheduler,
        runner=config.runner,
    )
    check_close(run(build(config), 10), run(build(unfused), 10), 0.3)


@torch.inference_mode()
def test_an_adapter_from_another_thread_is_its_merged_weights(path: Path, tmp_path: Path) -> None:
    adapter = make_adapter(path, tmp_path / "a", targets=(*ALL_LINEAR, "embed_tokens"))
    executor = build(settings(path))
    load_beside(executor, adapter)
    merged = build(settings(merge(path, adapter, tmp_path / "merged")))
    check_close(run(executor, 10, "a"), run(merged, 10), 0.3)


@torch.inference_mode()
@pytest.mark.parametrize("adapter_id", ["", "a"])
def test_launching_never_waits_for_the_device(adapter_id: str, path: Path, tmp_path: Path) -> None:
    executor = build(settings(path))
    if adapter_id:
        load_beside(executor, make_adapter(path, tmp_path / "a"))
    run(executor, 3, adapter_id)  # everything is compiled and loaded now
    executor.launch(
        SchedulerOutput(3, [], CachedRequestData([], [], {}), {}, 0, [], ["a", "b", "c"])
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(executor, 10, adapter_id)
    finally:
        torch.cuda.set_sync_debug_mode("default")


async def generate(config: EngineConfig, num_requests: int) -> list[list[int]]:
    async with AsyncEngine(config) as engine:
        return await generate_on(engine, num_requests)


async def generate_on(engine: AsyncEngine, num_requests: int) -> list[list[int]]:
    rng = random.Random(1)
    prompts = [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 600))] for _ in range(num_requests)
    ]

    async def one(index: int) -> list[int]:
        greedy = index % 2 == 0
        params = SamplingParams(
            max_tokens=60, temperature=0 if greedy else 0.8, seed=index, detokenize=False
        )
        stream = engine.generate(prompts[index], params)
        return [token for output in [o async for o in stream] for token in output.token_ids]

    return await asyncio.gather(*(one(i) for i in range(num_requests)))


@pytest.fixture
def with_tokenizer(path: Path) -> Path:
    import shutil

    import aioserve

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(aioserve.__file__).parent / "model_source" / "embedded" / name, path)
    return path


async def test_overlapped_steps_give_the_tokens_of_one_at_a_time(with_tokenizer: Path) -> None:
    """float32, in which batches of other sizes do not change a token."""
    overlapped = await generate(settings(with_tokenizer, 2, "float32"), 100)
    one_by_one = await generate(settings(with_tokenizer, 1, "float32"), 100)
    same = sum(a == b for a, b in zip(overlapped, one_by_one, strict=True))
    assert same >= 98  # a near tie may fall either way, as cuBLAS sums in another order


async def test_blocks_that_come_back_change_no_token(with_tokenizer: Path) -> None:
    """A pool for a few of the prompts, asked for twice."""
    config = settings(with_tokenizer, 2, "float32")
    small = msgspec.structs.replace(
        config.cache, num_kv_blocks=300, kv_connector="memory", kv_connector_gib=0.5
    )
    plain = await generate(config, 40)
    async with AsyncEngine(msgspec.structs.replace(config, cache=small)) as engine:
        for _ in range(2):
            found = await generate_on(engine, 40)
            same = sum(a == b for a, b in zip(found, plain, strict=True))
            assert same >= 38  # a near tie may fall either way, as cuBLAS sums in another order
        connector = engine.metrics.kv_connector.connector
        assert connector is not None
        assert connector.make_stats().num_hit_tokens > 0


async def test_a_draft_model_changes_no_token(with_tokenizer: Path) -> None:
    """Itself, so that most guesses are right; of a request in two, drawn."""
    config = settings(with_tokenizer, 1, "float32")
    draft = SpeculationConfig(speculative_method="draft", draft_model=str(with_tokenizer))
    guessed = await generate(msgspec.structs.replace(config, speculation=draft), 40)
    plain = await generate(config, 40)
    same = sum(a == b for a, b in zip(guessed, plain, strict=True))
    assert same >= 38  # a near tie may fall either way, as cuBLAS sums in another order


def test_a_pool_that_does_not_fit_is_refused_with_the_numbers(path: Path) -> None:
    config = settings(path, gpu_memory_utilization=0.05)
    config = EngineConfig(
        model=config.model,
        cache=CacheConfig(num_kv_blocks=50_000_000),
        scheduler=config.scheduler,
        runner=config.runner,
    )
    with pytest.raises(ConfigError, match="raise gpu_memory_utilization"):
        build(config)


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()
