"""What a model has besides its layers is served by two ranks as by one; the second is a process."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SpeculationConfig,
)
from aioserve.errors import AioserveError, ConfigError, EngineDeadError, RequestError
from tests.adapters import make_adapter
from tests.eagle_models import make_head
from tests.kit import stats_of
from tests.models import make_model
from tests.mtp_models import make_mtp_model
from tests.processes import PATIENCE
from tests.server.test_ranks import ranks_of

pytestmark = [pytest.mark.dist, pytest.mark.asyncio(loop_factories=["uvloop"])]

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0, detokenize=False)
PROMPTS = ([5] * 40, [6, 7, 8] * 20, [9] * 3, list(range(100, 170)))
RANKS = RunnerConfig(threads=2, device="cpu", tensor_parallel_size=2)


def of_model(path: Path, **sections: Any) -> EngineConfig:
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", skip_tokenizer_init=True),
        cache=CacheConfig(num_kv_blocks=24),
        runner=RunnerConfig(threads=1, device="cpu"),
    )
    return msgspec.structs.replace(config, **sections)


async def read(engine: AsyncEngine, prompt: list[int], **fields: Any) -> list[int]:
    outputs = engine.generate(prompt, PARAMS, **fields)
    return [token_id async for output in outputs for token_id in output.token_ids]


async def replies(engine: AsyncEngine, adapters: tuple[str | None, ...] = (None,)) -> Any:
    asks = [(prompt, {"adapter": name} if name else {}) for prompt in PROMPTS for name in adapters]
    return await asyncio.gather(*(read(engine, prompt, **own) for prompt, own in asks))


async def of_one_and_two(config: EngineConfig, *adapters: str | None) -> tuple[Any, Any]:
    async with AsyncEngine(config) as engine:
        one = await replies(engine, adapters or (None,))
    async with AsyncEngine(msgspec.structs.replace(config, runner=RANKS)) as engine:
        return one, await replies(engine, adapters or (None,))


@pytest.mark.parametrize("kind", ["llama", "olmo2"])  # by the kernels; by modules
async def test_rows_with_adapters_get_the_tokens_of_one_rank(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, tmp_path / "model")
    paths = [make_adapter(model, tmp_path / name, seed=ord(name), rank=5) for name in "ab"]
    lora = tuple(f"{path.name}={path}" for path in paths)
    config = of_model(model, adapters=AdapterConfig(lora=lora))
    one, two = await of_one_and_two(config, None, "a", "b")
    assert two == one
    assert one[0] != one[1] != one[2]


async def test_an_adapter_that_one_rank_refuses_is_left_out_by_all(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    wider = make_model("llama", tmp_path / "wider", intermediate_size=160)
    good, bad = make_adapter(model, tmp_path / "good"), make_adapter(wider, tmp_path / "bad")
    config = of_model(model, runner=RANKS, adapters=AdapterConfig(lora=(f"good={good}",)))
    async with AsyncEngine(config) as engine:
        expected = await replies(engine, ("good",))
        with pytest.raises((ConfigError, RequestError), match="is of another base"):
            await engine.adapters.load("bad", str(bad))
        await engine.adapters.load("again", str(good))
        assert await replies(engine, ("again",)) == expected
        engine.adapters.unload("again")
        assert await replies(engine, ("good",)) == expected


async def test_ranks_share_experts(tmp_path: Path) -> None:
    one, two = await of_one_and_two(of_model(make_model("mixtral", tmp_path / "model")))
    assert two == one


@pytest.mark.parametrize("kind", ["memory", "disk"])
async def test_every_rank_loads_its_heads_of_a_block(kind: str, tmp_path: Path) -> None:
    """What one engine leaves in a directory the next one finds, and no engine with one rank."""
    model, own = make_model("llama", tmp_path / "model"), {}
    if kind == "disk":
        own = {"kv_connector_path": str(tmp_path / "blocks"), "kv_connector_disk_gib": 0.01}
    cache = CacheConfig(num_kv_blocks=24, kv_connector=kind, kv_connector_gib=0.01, **own)  # type: ignore[arg-type]
    async with AsyncEngine(of_model(model)) as engine:
        expected = await replies(engine)
    for runner, is_found in ((RANKS, False), (RANKS, True), (RunnerConfig(threads=1), False)):
        async with AsyncEngine(of_model(model, runner=runner, cache=cache)) as engine:
            for _ in range(3):
                assert await replies(engine) == expected
                if kind == "memory":  # others take their blocks meanwhile
                    await read(engine, list(range(200, 500)))
            hits = _total(engine, "hit_tokens" if kind == "memory" else "fetched_tokens")
            if kind == "memory":
                assert hits > 0
                return
            assert (hits > 0) is is_found


def _total(engine: AsyncEngine, name: str) -> float:
    lines = engine.internals.render_metrics([]).decode().splitlines()
    line = next(x for x in lines if x.startswith(f"aioserve_kv_connector_{name}_total"))
    return float(line.split()[-1])


@pytest.mark.parametrize("activations", [None, "int8"])
async def test_ranks_share_quantized_weights(activations: Any, tmp_path: Path) -> None:
    """Groups of inputs end where shares do, so that the codes are those of one rank."""
    path = make_model("llama", tmp_path / "model", intermediate_size=128)
    config = of_model(path)
    model = msgspec.structs.replace(config.model, quantization="int8", activations=activations)
    one, two = await of_one_and_two(msgspec.structs.replace(config, model=model))
    assert two == one


async def test_a_share_of_a_group_is_refused(tmp_path: Path) -> None:
    config = of_model(make_model("llama", tmp_path / "model"), runner=RANKS)
    model = msgspec.structs.replace(config.model, quantization="int4")
    words = "the 96 inputs of .*down_proj are quantized in groups of 32, .* inputs 0 to 48"
    with pytest.raises(ConfigError, match=words):
        async with AsyncEngine(msgspec.structs.replace(config, model=model)):
            pass


@pytest.mark.parametrize("way", ["draft model", "EAGLE-3 head", "MTP layer"])
async def test_the_first_rank_drafts_and_all_verify(way: str, tmp_path: Path) -> None:
    if way == "MTP layer":
        path = make_mtp_model("llama", tmp_path / "model")
        own: dict[str, Any] = {"speculative_method": "mtp"}
    else:
        path, draft = tmp_path / "model", tmp_path / "draft"
        make_model("llama", path, vocab_size=2048)
        if way == "draft model":
            make_model("llama", draft, vocab_size=2048)
        else:
            make_head(draft, target=64, layers=(0, 1, 1), vocab_size=2048)
        own = {"speculative_method": "draft", "draft_model": str(draft)}
    config = of_model(path, speculation=SpeculationConfig(num_speculative_tokens=3, **own))
    async with AsyncEngine(of_model(path)) as engine:
        expected = await replies(engine)
    async with AsyncEngine(msgspec.structs.replace(config, runner=RANKS)) as engine:
        assert await replies(engine) == expected
        await engine.sleep(weights=True)
        await engine.wake()
        assert await replies(engine) == expected
        stats = stats_of(engine)
        assert stats.num_draft_tokens > 0


@pytest.mark.parametrize("is_asleep", [False, True])
async def test_a_rank_that_dies_between_steps_ends_the_engine(
    is_asleep: bool, tmp_path: Path
) -> None:
    model = make_model("llama", tmp_path / "model")
    engine = AsyncEngine(of_model(model, runner=RANKS))
    await engine.start()
    try:
        if is_asleep:
            await engine.sleep(weights=True)
        [rank] = ranks_of(psutil.Process())
        rank.kill()
        with pytest.raises(AioserveError, match=r"rank 1 of 2: process .* killed by SIGKILL"):
            async with asyncio.timeout(PATIENCE):
                await (engine.wake() if is_asleep else engine.reload(str(model)))
        with pytest.raises(EngineDeadError):
            await replies(engine)
    finally:
        await engine.shutdown()
