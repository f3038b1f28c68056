"""Adapters on a device: their rows say what merged weights say, whatever else is in flight."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from aioserve import AsyncEngine, SamplingParams
from aioserve.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.errors import ConfigError
from aioserve.features.lora.peft_directory import read_adapter
from aioserve.gpu.cuda.executor import DecodeGraphs
from aioserve.outputs import ModelRunnerOutput
from aioserve.scheduler.output import NewRequestData, SchedulerOutput
from tests.adapters import ALL_LINEAR, make_adapter, merge
from tests.greedy import GreedyReference
from tests.models import make_model
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.test_load import build, settings
from tests.runner.cuda.test_runner import make_runner
from tests.runner.driver import Driver
from tests.slow import mostly_slow

# The loop is the subject of other tests; these load a model each.
on_one_loop = pytest.mark.asyncio(loop_factories=["uvloop"])

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 5, 6, 7, 8, 9, 10, 11, 12, 13]
ADAPTERS = ("one", "two", "three")
NAMES = [*ADAPTERS, "", "two", "one", "", "three", "three", "one"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("adapted") / "base")


@pytest.fixture(scope="module")
def paths(base: Path) -> dict[str, Path]:
    """All linear layers; some of them, of two ranks; embedding and head besides."""
    return {
        "one": make_adapter(base, base.parent / "one", seed=1),
        "two": make_adapter(
            base,
            base.parent / "two",
            seed=2,
            targets=("q_proj", "v_proj"),
            rank_pattern={"layers.1.self_attn.q_proj": 17},
        ),
        "three": make_adapter(
            base, base.parent / "three", seed=3, targets=(*ALL_LINEAR, "embed_tokens", "lm_head")
        ),
    }


@pytest.fixture(scope="module")
def references(base: Path, paths: dict[str, Path]) -> dict[str, GreedyReference]:
    merged = {name: merge(base, path, path.with_name(f"{name}-m")) for name, path in paths.items()}
    return {
        name: GreedyReference(path, torch.float32) for name, path in {"": base, **merged}.items()
    }


@pytest.fixture(scope="module")
def expected(references: dict[str, GreedyReference]) -> dict[str, Any]:
    return {name: reference.tokens(PROMPT, 12) for name, reference in references.items()}


def make_config(base: Path, depth: int = 2, **sections: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": ModelConfig(
                model=str(base), dtype="float32", skip_tokenizer_init=True, max_model_len=64
            ),
            "cache": CacheConfig(num_kv_blocks=20, block_size=4),
            "scheduler": SchedulerConfig(
                max_num_seqs=6,
                max_loras=2,
                pipeline_depth=depth,
                options={"chunk_size": 9},
                max_num_batched_tokens=64,
            ),
            "runner": RunnerConfig(threads=1),
            **sections,
        }
    )


async def say(engine: AsyncEngine, name: str, **params: Any) -> tuple[list[int], list[Any]]:
    """Tokens, and log probabilities of the prompt's."""
    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, **params)
    tokens: list[int] = []
    of_prompt: list[Any] = []
    async for output in engine.generate(PROMPT, sampling, adapter=name):
        tokens += output.token_ids
        of_prompt += output.prompt_logprobs or ()
    return tokens, of_prompt


@on_one_loop
@pytest.mark.parametrize(
    ("fused", "depth"),
    mostly_slow([(True, 2), (False, 2), (True, 1)], but=[(True, 2), (False, 2)]),
)
async def test_a_mixed_batch_in_flight_says_what_merged_weights_say(
    fused: bool,
    depth: int,
    base: Path,
    paths: dict[str, Path],
    references: dict[str, GreedyReference],
    expected: dict[str, Any],
) -> None:
    """With two places for three adapters in a step, prompts cut and told, too few blocks for all,
    cached prefixes; and, at depth 1, drafts.
    """
    sections: dict[str, Any] = {}
    if depth == 1:
        # Drafts, as many as their seconds allow, end requests sooner: so fewer blocks, or nothing
        # would be preempted.
        sections["speculation"] = SpeculationConfig(speculative_method="ngram", prompt_lookup_min=2)
        sections["cache"] = CacheConfig(num_kv_blocks=16, block_size=4)
    config = make_config(base, depth, **sections)
    device = FakeDevice(1, eagerness=0.3)
    runner = make_runner(config, device, fused=fused)
    async with AsyncEngine(config, runner=runner) as engine:
        for name, path in paths.items():
            await engine.adapters.load(name, str(path))
        told = {2: 1, 3: 0, 9: 2}
        found = await asyncio.gather(
            *(say(engine, name, prompt_logprobs=told.get(i)) for i, name in enumerate(NAMES))
        )
        assert [tokens for tokens, _ in found] == [expected[name] for name in NAMES]
        for number in told:
            check_prompt(found[number][1], references[NAMES[number]])
        assert (await say(engine, "two"))[0] == expected["two"]  # from its own blocks
        stats = engine.get_stats()
        assert stats is not None
        assert stats.num_preemptions > 0
        assert stats.num_prefix_hit_tokens > 0
    assert len({tuple(tokens) for tokens in expected.values()}) == 4


@torch.inference_mode()
def check_prompt(found: list[Any], reference: GreedyReference) -> None:
    logits = reference._model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert len(found) == len(PROMPT)
    for place, entry in enumerate(found[1:]):
        assert entry.logprob == pytest.approx(float(logits[place, PROMPT[place + 1]]), abs=1e-3)


@on_one_loop
async def test_adapters_come_and_go_while_steps_run(
    base: Path, paths: dict[str, Path], expected: dict[str, Any]
) -> None:
    """One place in memory for all: each is brought again when it is asked for, from a thread that
    is not the launching one (the device sees to that).
    """
    config = make_config(base, adapters=AdapterConfig(max_cpu_loras=1))
    device = FakeDevice(2, eagerness=0.3)
    async with AsyncEngine(config, runner=make_runner(config, device, fused=True)) as engine:

        async def without() -> None:
            for _ in range(4):
                assert (await say(engine, ""))[0] == expected[""]

        async def come() -> None:
            for name, path in paths.items():
                await engine.adapters.load(name, str(path))
            names = [*ADAPTERS, "one", "two", "three", "one"]
            found = await asyncio.gather(*(say(engine, name) for name in names))
            assert [tokens for tokens, _ in found] == [expected[name] for name in names]

        await asyncio.gather(without(), come())
        assert engine.metrics.adapters.num_evictions >= 4
        assert engine.metrics.adapters.num_resident == 1
        stream = await engine.add_request(
            PROMPT, SamplingParams(temperature=0, max_tokens=12, detokenize=False), adapter="one"
        )
        engine.adapters.unload("one")
        async with stream:
            assert [t async for out in stream for t in out.token_ids] == expected["one"]


@torch.inference_mode()
def test_steps_with_adapters_use_no_graphs_and_others_do(
    base: Path, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the very size that was captured: a graph has the products of no adapter."""
    executor = build(settings(base), FakeDevice())
    executor.capture((1, 2))
    executor.adapters.load("one", executor.adapters.put(read_adapter(paths["one"])))
    replayed: list[int] = []
    replay = DecodeGraphs.replay

    def noted(self: DecodeGraphs, size: int) -> torch.Tensor:
        replayed.append(size)
        return replay(self, size)

    monkeypatch.setattr(DecodeGraphs, "replay", noted)

    class Runner:
        def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
            launched = executor.launch(step)
            assert launched is not None
            return executor.finish(launched)

    class Adapted(Driver):
        def new_request_data(self, request_id: str) -> NewRequestData:
            data = super().new_request_data(request_id)
            return msgspec.structs.replace(data, adapter_id="one" if request_id == "a" else "")

    driver = Adapted(Runner(), 128, 8)  # type: ignore[arg-type]
    for name in "ab":
        driver.add(name, PROMPT)
    driver.step()
    driver.step()
    driver.step({"a": 1})
    assert not replayed
    driver.step({"b": 1})
    assert replayed == [1]


def test_an_adapter_for_which_there_is_no_room_is_refused_with_the_numbers(
    base: Path, paths: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """What is loaded at start has its share of the memory; the rest takes what nobody was given."""
    caplog.set_level(logging.INFO)
    lora = AdapterConfig(lora=tuple(f"{name}={path}" for name, path in paths.items()))
    files = {name: read_adapter(path) for name, path in paths.items()}
    config = msgspec.structs.replace(settings(base), adapters=lora)
    executor = build(config, FakeDevice())
    assert "adapters 0.00, KV pool" in caplog.text
    room = 4 * (files["one"].num_parameters + files["two"].num_parameters)
    executor.adapters._room = room
    kept = [executor.adapters.put(files[name]) for name in ("one", "two")]
    with pytest.raises(ConfigError, match=r"three takes 0\.\d MiB of the device, 0\.0 are left"):
        executor.adapters.put(files["three"])
    kept.pop()
    kept.append(executor.adapters.put(files["two"]))  # whose place is free again
