"""Adapters by name: brought into memory for requests, kept for them, gone after them."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.errors import (
    ConfigError,
    EngineDeadError,
    RequestError,
    RequestFailedError,
    RequestTimeoutError,
    UnknownModelError,
)
from tests.adapters import make_adapter, merge
from tests.greedy import GreedyReference
from tests.kit import stats_of
from tests.models import make_model
from tests.slow import mostly_slow

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7, 8, 9, 10, 11, 12, 13]
PARAMS = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
ADAPTERS = ("one", "two", "three")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("adapted") / "base")


@pytest.fixture(scope="module")
def paths(base: Path) -> dict[str, Path]:
    return {
        name: make_adapter(base, base.parent / name, seed=seed, strength=0.5)
        for seed, name in enumerate(ADAPTERS)
    }


@pytest.fixture(scope="module")
def expected(base: Path, paths: dict[str, Path]) -> dict[str, Any]:
    """Greedy tokens after `PROMPT`, of each with its weights merged, and of none."""
    import torch

    merged = {name: merge(base, path, path.with_name(f"{name}-m")) for name, path in paths.items()}
    return {
        name: GreedyReference(path, torch.float32).tokens(PROMPT, 12)
        for name, path in {"": base, **merged}.items()
    }


def make_config(
    base: Path, lora: dict[str, Path], *, max_cpu_loras: int = 32, **sections: Any
) -> EngineConfig:
    adapters = AdapterConfig(
        lora=tuple(f"{name}={path}" for name, path in lora.items()), max_cpu_loras=max_cpu_loras
    )
    return EngineConfig(
        **{
            "model": ModelConfig(
                model=str(base), dtype="float32", skip_tokenizer_init=True, max_model_len=64
            ),
            "cache": CacheConfig(num_kv_blocks=64, block_size=4),
            "adapters": adapters,
            "runner": RunnerConfig(threads=1),
            **sections,
        }
    )


async def say(engine: AsyncEngine, name: str, **more: Any) -> list[int]:
    tokens = []
    async for output in engine.generate(PROMPT, PARAMS, adapter=name, **more):
        tokens += output.token_ids
    return tokens


@pytest.mark.parametrize(
    "policy",
    mostly_slow(
        [
            *("fcfs", "priority", "chunked_prefill", "hrrn", "fair", "deadline"),
            *("latency_budget", "mlfq", "prefix_aged"),
        ],
        but=["priority", "mlfq"],
    ),
)
async def test_each_request_gets_its_adapter_whatever_the_policy(
    policy: str, base: Path, paths: dict[str, Path], expected: dict[str, Any]
) -> None:
    """With two places for three adapters, too few blocks for all however many drafts are right,
    and cached prefixes.
    """
    options = {"chunk_size": 9} if policy == "chunked_prefill" else {}
    config = make_config(
        base,
        paths,
        cache=CacheConfig(num_kv_blocks=16, block_size=4),
        scheduler=SchedulerConfig(policy=policy, options=options, max_num_seqs=6, max_loras=2),
        speculation=SpeculationConfig(speculative_method="ngram", prompt_lookup_min=2),
    )
    names = [*ADAPTERS, "", "two", "one", "", "three", "three", "one"]
    async with AsyncEngine(config) as engine:
        found = await asyncio.gather(
            *(say(engine, name, priority=-number) for number, name in enumerate(names))
        )
        assert found == [expected[name] for name in names]
        again = await say(engine, "two")  # from its own blocks
        assert again == expected["two"]
        stats = stats_of(engine)
        assert stats.num_preemptions > 0
        assert stats.num_prefix_hit_tokens > 0


async def test_weights_of_few_bits_take_adapters(base: Path, paths: dict[str, Path]) -> None:
    """As much as they do without: what is added does not depend on how the rest is stored."""
    found = {}
    for quantization in (None, "int8"):
        model = ModelConfig(
            model=str(base),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=64,
            quantization=quantization,  # type: ignore[arg-type]
        )
        params = SamplingParams(temperature=0, max_tokens=1, detokenize=False, logprobs=0)
        async with AsyncEngine(make_config(base, paths, model=model)) as engine:
            for name in ("", "one"):
                async for output in engine.generate(PROMPT, params, adapter=name):
                    assert output.logprobs is not None
                    found[quantization, name] = (output.token_ids, output.logprobs[0].logprob)
    for name in ("", "one"):
        (tokens, exact), (rounded_tokens, rounded) = found[None, name], found["int8", name]
        assert tokens == rounded_tokens
        assert rounded == pytest.approx(exact, abs=0.2)
    assert found[None, ""] != found[None, "one"]


async def test_the_least_recently_used_goes_and_comes_again(
    base: Path, paths: dict[str, Path], expected: dict[str, Any]
) -> None:
    async with AsyncEngine(make_config(base, paths, max_cpu_loras=2)) as engine:
        assert engine.metrics.adapters.num_resident == 2
        names = [*ADAPTERS, "one", "", "two", "three", "one"]
        found = await asyncio.gather(*(say(engine, name) for name in names))
        assert found == [expected[name] for name in names]
        stats = engine.metrics.adapters
        assert stats.num_resident == 2
        assert stats.num_evictions >= 3
        assert stats.num_loads == stats.num_evictions + 2
        # Its blocks are found again: they are known by its weights.
        before = engine.get_stats()
        assert await say(engine, "one") == expected["one"]
        after = engine.get_stats()
        assert before is not None
        assert after is not None
        assert after.num_prefix_hit_tokens > before.num_prefix_hit_tokens


async def test_an_adapter_in_use_is_not_evicted_and_the_next_waits_its_turn(
    base: Path, paths: dict[str, Path], expected: dict[str, Any]
) -> None:
    """Requests for the one that is there do not keep others out for ever."""
    async with AsyncEngine(make_config(base, paths, max_cpu_loras=1)) as engine:
        first = await engine.add_request(PROMPT, PARAMS, adapter="one")
        waiting = asyncio.create_task(say(engine, "two"))
        await asyncio.sleep(0)
        late = asyncio.create_task(say(engine, "one"))  # behind it, though its adapter is there
        with pytest.raises(RequestTimeoutError, match="was not loaded within"):
            await say(engine, "three", timeout=0.001)
        async with first:
            tokens = [token async for output in first for token in output.token_ids]
        assert tokens == expected["one"]
        assert await waiting == expected["two"]
        assert await late == expected["one"]
        assert engine.metrics.adapters.num_loads == 6  # three at the start


async def test_who_leaves_or_is_refused_lets_go_of_its_adapter(
    base: Path, paths: dict[str, Path], expected: dict[str, Any]
) -> None:
    async with AsyncEngine(make_config(base, paths, max_cpu_loras=1)) as engine:
        stream = await engine.add_request(PROMPT, PARAMS, adapter="one", request_id="r")
        async with stream:
            pass
        with pytest.raises(RequestError, match="limit is 64"):
            await say_long(engine)
        await engine.add_request(PROMPT, PARAMS, adapter="two", request_id="s")
        engine.abort_now("s")
        both = SamplingParams(temperature=0, n=2, max_tokens=3, detokenize=False)
        async for _ in engine.generate(PROMPT, both, adapter="three"):
            pass
        assert await say(engine, "one") == expected["one"]


async def say_long(engine: AsyncEngine) -> None:
    async for _ in engine.generate(PROMPT * 9, PARAMS, adapter="two"):
        pass


async def test_what_is_unloaded_finishes_and_then_is_unknown(
    base: Path, paths: dict[str, Path], expected: dict[str, Any]
) -> None:
    async with AsyncEngine(make_config(base, {"one": paths["one"]})) as engine:
        stream = await engine.add_request(PROMPT, PARAMS, adapter="one")
        engine.adapters.unload("one")
        with pytest.raises(UnknownModelError, match="model 'one' does not exist"):
            await say(engine, "one")
        with pytest.raises(UnknownModelError):
            engine.adapters.unload("one")
        # Another of that name finds nothing that the first has left.
        await engine.adapters.load("one", str(paths["two"]))
        assert await say(engine, "one") == expected["two"]
        async with stream:
            assert [t async for out in stream for t in out.token_ids] == expected["one"]
        assert engine.metrics.adapters.num_resident == 1
        engine.adapters.unload("one")
        await engine.adapters.load("one", str(paths["one"]))
        assert await say(engine, "one") == expected["one"]


async def test_adapters_come_while_others_run(
    base: Path, paths: dict[str, Path], expected: dict[str, Any]
) -> None:
    async with AsyncEngine(make_config(base, {})) as engine:
        running = asyncio.create_task(say(engine, ""))
        await asyncio.gather(*(engine.adapters.load(n, str(p)) for n, p in paths.items()))
        assert await running == expected[""]
        assert await say(engine, "three") == expected["three"]


async def test_what_cannot_be_loaded_changes_nothing(
    base: Path, paths: dict[str, Path], expected: dict[str, Any], tmp_path: Path
) -> None:
    other = make_model("llama", tmp_path / "other", hidden_size=32)
    stranger = make_adapter(other, tmp_path / "stranger")
    async with AsyncEngine(make_config(base, {"one": paths["one"]})) as engine:
        adapters, path = engine.adapters, str(paths["two"])
        for name, where, why in (
            ("one", path, "is in use"),
            (str(base), path, "is the model's own"),
            ("", path, "needs a name"),
            ("new", str(tmp_path / "nowhere"), "no adapter_config.json"),
            ("new", str(stranger), "it is of another base"),
        ):
            with pytest.raises(ConfigError, match=why):
                await adapters.load(name, where)
        twice = (adapters.load("new", path), adapters.load("new", path))
        results = await asyncio.gather(*twice, return_exceptions=True)
        assert [type(result) for result in results] == [type(None), ConfigError]
        assert list(adapters.paths) == ["one", "new"]
        assert await say(engine, "new") == expected["two"]
    for lora, why in ((("one",), "must be NAME=PATH"), ((f"a={stranger}",), "of another base")):
        config = make_config(base, {}, adapters=AdapterConfig(lora=lora))
        with pytest.raises(ConfigError, match=why):
            await AsyncEngine(config).start()


async def test_files_that_are_gone_fail_the_request_alone(
    base: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    lost = make_adapter(base, tmp_path / "lost", seed=0)
    kept = make_adapter(base, tmp_path / "kept", seed=1)
    config = make_config(base, {"lost": lost, "kept": kept}, max_cpu_loras=1)
    async with AsyncEngine(config) as engine:
        (lost / "adapter_model.safetensors").unlink()
        with pytest.raises(RequestFailedError, match="again: no adapter_model"):
            await say(engine, "lost")
        assert await say(engine, "kept") == expected["two"]


async def test_adapters_outlive_a_sleep_and_go_onto_other_weights(
    base: Path, paths: dict[str, Path], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Of requests that are kept, too, though the adapter of one was unloaded meanwhile."""
    import torch

    other = shutil.copytree(base, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    rolled = {n: w.roll(1, 0).contiguous() if "embed" in n else w for n, w in weights.items()}
    save_file(rolled, other / "model.safetensors", metadata={"format": "pt"})
    merged = merge(other, paths["two"], tmp_path / "merged")
    of_other = GreedyReference(merged, torch.float32).tokens(PROMPT, 12)
    async with AsyncEngine(make_config(base, {n: paths[n] for n in ("one", "two")})) as engine:
        with_it = await engine.add_request(PROMPT, PARAMS, adapter="one")
        found = (await anext(with_it)).token_ids
        engine.adapters.unload("one")
        await engine.sleep(weights=True)
        with pytest.raises(ConfigError, match="asleep: wake it first"):
            await engine.adapters.load("three", str(paths["three"]))
        await engine.wake()
        async for output in with_it:
            found += output.token_ids
        assert found == expected["one"]
        assert await say(engine, "two") == expected["two"]
        results = await asyncio.gather(
            engine.adapters.load("one", str(paths["one"])),
            engine.reload(str(other)),
            return_exceptions=True,
        )
        assert None in results
        assert await say(engine, "two") == of_other != expected["two"]
        await engine.reload(str(base))
        assert await say(engine, "two") == expected["two"]


async def test_an_adapter_that_was_evicted_is_read_after_the_sleep(
    base: Path, paths: dict[str, Path], expected: dict[str, Any]
) -> None:
    async with AsyncEngine(make_config(base, paths, max_cpu_loras=1)) as engine:
        await engine.sleep(weights=True)
        asked = asyncio.gather(*(say(engine, name) for name in ADAPTERS))
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert not asked.done()
        await engine.wake()
        assert await asked == [expected[name] for name in ADAPTERS]
        await engine.sleep(weights=True)
        waiting = asyncio.create_task(say(engine, ADAPTERS[0]))
        await asyncio.sleep(0.01)
        await engine.shutdown()
        with pytest.raises(EngineDeadError):
            await waiting


async def test_an_adapter_with_weights_of_the_model_is_for_no_others(
    base: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    own = make_adapter(base, tmp_path / "own", seed=0)
    tensors = load_file(own / "adapter_model.safetensors")
    head = load_file(base / "model.safetensors")["lm_head.weight"]
    tensors["base_model.model.lm_head.base_layer.weight"] = head
    save_file(tensors, own / "adapter_model.safetensors")
    async with AsyncEngine(make_config(base, {"own": own})) as engine:
        with pytest.raises(ConfigError, match=r"let their requests end \(own\)"):
            await engine.reload(str(base))
        await engine.sleep(weights=True)
        await engine.wake()
        assert await say(engine, "own") == expected["one"]
        engine.adapters.unload("own")
        await engine.reload(str(base))
