"""Two ranks on devices give the tokens of one, and end together.

The second is a process, as on cards; gloo stands in for NCCL.
"""

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import aioserve
from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import AdapterConfig, CacheConfig, ModelConfig, RunnerConfig, SpeculationConfig
from aioserve.errors import AioserveError, ConfigError
from aioserve.features.grammars import GrammarCompiler
from aioserve.gpu.cuda.executor import StepExecutor
from aioserve.gpu.cuda.sharded_runner import ShardedOverlappedRunner
from aioserve.model_source.info import ModelInfo
from aioserve.runner.ranks import Ranks
from tests.engine.test_speculation import NONE, check_equal, generate
from tests.gguf_models import write_gguf
from tests.models import make_model
from tests.processes import COMPUTING_SECONDS
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.on_device import make_rank

# The loop is the subject of other tests; these load two models each.
_on_uvloop = pytest.mark.asyncio(loop_factories=["uvloop"])


class OnDevices(ShardedOverlappedRunner):
    _rank_module = "tests.runner.cuda.device_rank"


def make_runner(config: EngineConfig, device: FakeDevice) -> OnDevices:
    runner = RunnerConfig(tensor_parallel_size=2, rank_timeout=COMPUTING_SECONDS)
    config = msgspec.structs.replace(config, runner=runner)
    info = ModelInfo(config.model)

    def build(ranks: Ranks, grammars: GrammarCompiler | None) -> StepExecutor:
        torch.set_num_threads(1)
        return make_rank(config, info, device, ranks, grammars)

    return OnDevices(config, info, build)


@pytest.fixture(scope="module", params=["llama"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """With two KV heads, and the tokenizer of the embedded one."""
    path = tmp_path_factory.mktemp("ranks")
    make_model(request.param, path, vocab_size=2048, eos_token_id=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(aioserve.__file__).parent / "model_source" / "embedded" / name, path)
    return str(path)


@pytest.mark.dist
@_on_uvloop
@pytest.mark.parametrize("model", ["llama", "mistral"], indirect=True)
async def test_two_ranks_on_devices_give_the_tokens_of_one(
    model: str, request: pytest.FixtureRequest
) -> None:
    """With steps in flight, prompts in pieces, preemptions, grammars and log probabilities."""
    plain, _ = await generate(NONE, model=model)
    shared, stats = await generate(
        NONE,
        model=model,
        make_runner=lambda config: make_runner(config, FakeDevice(1, eagerness=0.5)),
        max_num_batched_tokens=24,
    )
    check_equal(shared, plain)
    assert stats.num_preemptions
    has_windows = request.node.callspec.params["model"] == "mistral"
    assert bool(stats.num_window_blocks) is has_windows


def small_config(model: str, name: str = "mine") -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model, dtype="float32", max_model_len=128, served_model_name=name),
        cache=CacheConfig(num_kv_blocks=16),
    )


@_on_uvloop
@pytest.mark.dist
async def test_a_rank_that_dies_is_told_to_who_waits(model: str) -> None:
    config = small_config(model)
    runner = make_runner(config, FakeDevice(1, eagerness=0.5))
    async with AsyncEngine(config, runner=runner) as engine:

        async def ask() -> None:
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            async for _ in engine.generate("First", params):
                os.kill(runner._others.pids[0], signal.SIGKILL)

        with pytest.raises(AioserveError, match=r"rank 1 of 2: process .* killed by SIGKILL"):
            await ask()


@_on_uvloop
@pytest.mark.dist
async def test_a_rank_that_cannot_load_says_why(model: str) -> None:
    config = small_config(model, "failing")
    runner = make_runner(config, FakeDevice(1))
    with pytest.raises(ConfigError, match="rank 1 of 2: MemoryError: as asked"):
        async with AsyncEngine(config, runner=runner):
            pass


@_on_uvloop
@pytest.mark.dist
async def test_a_rank_that_dies_while_it_loads_keeps_no_card_waiting(model: str) -> None:
    config = small_config(model)
    runner = make_runner(config, FakeDevice(1))
    has_left = threading.Event()

    def wait_for_sum(ranks: Ranks, _: object) -> StepExecutor:
        """As NCCL on one machine: it does not notice that the other has gone."""
        ranks.leave = has_left.set  # type: ignore[method-assign]
        os.kill(runner._others.pids[0], signal.SIGKILL)
        has_left.wait(COMPUTING_SECONDS)
        raise RuntimeError("the communicator was aborted")

    runner._make_first = wait_for_sum
    with pytest.raises(ConfigError, match=r"rank 1 of 2: process .* killed by SIGKILL"):
        async with AsyncEngine(config, runner=runner):
            pass
    assert has_left.is_set()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"speculation": SpeculationConfig(speculative_method="ngram")}, "speculation"),
        ({"adapters": AdapterConfig(lora=("a=b",))}, "adapters.lora: leave it out"),
        ({"cache": CacheConfig(kv_connector="memory")}, "cache.kv_connector: leave it out"),
    ],
)
def test_what_only_ranks_on_a_cpu_serve_is_refused(
    model: str, sections: dict[str, Any], words: str
) -> None:
    config = EngineConfig(
        model=ModelConfig(model=model), runner=RunnerConfig(tensor_parallel_size=2), **sections
    )
    with pytest.raises(ConfigError, match=f"CUDA ranks do not serve {words}"):
        ShardedOverlappedRunner(config, ModelInfo(config.model))


def test_experts_are_refused_with_ranks_on_devices(tmp_path: Path) -> None:
    path = str(make_model("mixtral", tmp_path))
    runner = RunnerConfig(tensor_parallel_size=2)
    config = EngineConfig(model=ModelConfig(model=path), runner=runner)
    with pytest.raises(ConfigError, match="CUDA ranks do not serve a model with experts"):
        ShardedOverlappedRunner(config, ModelInfo(config.model))


def test_quantized_files_are_refused_with_ranks_on_devices(tmp_path: Path) -> None:
    path = str(write_gguf(make_model("llama", tmp_path / "whole"), tmp_path / "m.gguf"))
    runner = RunnerConfig(tensor_parallel_size=2)
    config = EngineConfig(model=ModelConfig(model=path), runner=runner)
    with pytest.raises(ConfigError, match="CUDA ranks do not serve a GGUF file or another of qua"):
        ShardedOverlappedRunner(config, ModelInfo(config.model))
