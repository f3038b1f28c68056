"""Two ranks share files of quantized weights, and give the tokens of one process.

Most have the second rank in a thread; that it can be a process is shown once for each kind of file.
"""

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import AsyncEngine, EngineConfig
from aioserve.config import RunnerConfig
from aioserve.errors import ConfigError
from aioserve.features.gguf import GgufFile
from aioserve.features.quantized import FORMATS
from aioserve.gpu.tensor_parallel.shard import check_groups
from aioserve.model_source.directory import Directory
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu.load import load_on_cpu
from tests.gguf_models import write_gguf
from tests.gguf_written import WRITTEN, make_written
from tests.kit import greedy, small_config, tokens_of
from tests.models import make_model
from tests.packed_checkpoints import awq, gptq, write_checkpoint
from tests.runner.cpu.test_ranks import Pair, serve
from tests.runner.driver import BLOCK_SIZE, NUM_BLOCKS, Driver, make_config
from tests.slow import mostly_slow
from tests.variants import needs_kernels

pytestmark = needs_kernels

#: Halves of all inputs are whole groups of 256.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
}
EXPERTS: dict[str, Any] = {
    **SIZES,
    "moe_intermediate_size": 512,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
#: Architectures of GGUF files with plans, with experts and without; and with windows.
PLANNED = ["llama", "olmo2", "qwen2_moe", "qwen3_moe", "deepseek_v3"]
WINDOWED = ("gemma2", "phi3")
METHODS = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False}, gptq(4, 128)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, awq(32)),
}


@pytest.fixture
def pair_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Driver]]:
    """`pair_of(path)`: a driver of two ranks."""
    lock, pairs = threading.Lock(), list[Pair]()  # a load changes functions of torch meanwhile
    for source in (Directory, GgufFile):
        own = source.load_module

        def one_at_a_time(*arguments: Any, _own: Any = own, **options: Any) -> Any:
            with lock:
                return _own(*arguments, **options)

        monkeypatch.setattr(source, "load_module", one_at_a_time)

    def make(path: Path, **settings: Any) -> Driver:
        pairs.append(Pair(with_ranks(make_config(path, **settings)), tmp_path / str(len(pairs))))
        return Driver(pairs[-1], NUM_BLOCKS, BLOCK_SIZE)  # type: ignore[arg-type]

    yield make
    for pair in pairs:
        pair.close()


def with_ranks(config: EngineConfig) -> EngineConfig:
    runner = msgspec.structs.replace(config.runner, tensor_parallel_size=2, threads=None)
    return msgspec.structs.replace(config, runner=runner)


def check(path: Path, pair_of: Callable[..., Driver]) -> Any:
    """Both give the same; the one process and the pair."""
    settings = {"dtype": "float32", "skip_tokenizer_init": True}
    config = make_config(path, **settings)
    alone = load_on_cpu(config, ModelInfo(config.model))
    try:
        two = pair_of(path, **settings)
        expected, numbers = serve(Driver(alone, NUM_BLOCKS, BLOCK_SIZE))
        found, own = serve(two)
        assert found == expected
        assert own == pytest.approx(numbers, rel=1e-3, abs=1e-3)
        assert len({len(output) for output in found.values()}) > 1
        model, half = alone._model, two.runner.first._model  # type: ignore[attr-defined]
        assert half.is_compiled is model.is_compiled
        assert half.is_stored is model.is_stored or not model.is_compiled
    finally:
        alone.close()
    return two


@pytest.mark.parametrize("kind", mostly_slow([*FORMATS, "F16", "BF16"], but=["Q8_0", "Q4_K"]))
def test_a_gguf_file_of_any_type_gives_the_tokens_of_one_process(
    kind: str, tmp_path: Path, pair_of: Callable[..., Driver]
) -> None:
    directory = make_model("llama", tmp_path / "float", **SIZES)
    check(write_gguf(directory, tmp_path / "m.gguf", kind_of=lambda name: kind), pair_of)


@pytest.mark.parametrize("name", mostly_slow(PLANNED, but=["olmo2", "qwen2_moe"]))
def test_files_of_architectures_with_a_plan_give_the_tokens_of_one_process(
    name: str, tmp_path: Path, pair_of: Callable[..., Driver]
) -> None:
    check(make_written(WRITTEN[name], tmp_path)[1], pair_of)


@pytest.mark.parametrize("kind", mostly_slow(["Q4_1", "Q6_K"], but=["Q6_K"]))
def test_experts_of_a_file_are_shared_as_they_are_stored(
    kind: str, tmp_path: Path, pair_of: Callable[..., Driver]
) -> None:
    directory = make_model("qwen3_moe", tmp_path / "float", **EXPERTS)
    check(write_gguf(directory, tmp_path / "m.gguf", kind_of=lambda name: kind), pair_of)


@pytest.mark.parametrize("method", METHODS)
def test_a_quantized_checkpoint_gives_the_tokens_of_one_process(
    method: str, tmp_path: Path, pair_of: Callable[..., Driver]
) -> None:
    config, write = METHODS[method]
    directory = make_model("llama", tmp_path / "float", **SIZES)
    check(write_checkpoint(directory, tmp_path / "few", config, write), pair_of)


@pytest.mark.parametrize("is_file", [True, False])
def test_a_group_that_would_be_cut_through_is_refused_before_weights_are_read(
    is_file: bool, tmp_path: Path
) -> None:
    directory = make_model("llama", tmp_path / "float", **SIZES | {"intermediate_size": 768})
    if is_file:
        path = write_gguf(directory, tmp_path / "m.gguf", kind_of=lambda name: "Q4_K")
    else:
        config = {"quant_method": "gptq", "bits": 4, "group_size": 256, "sym": False}
        path = write_checkpoint(directory, tmp_path / "few", config, gptq(4, 256))
    info = ModelInfo(make_config(path).model)
    with pytest.raises(
        ConfigError,
        match=r"the 768 inputs of model.layers.0.mlp.down_proj are quantized in groups of 256, of "
        r"which a rank's share, inputs 0 to 384, would have parts: runner.tensor_parallel_size",
    ):
        check_groups(info, 2)
    check_groups(info, 1)


@pytest.mark.dist
@pytest.mark.parametrize("name", ["qwen3_moe", "awq", *WINDOWED])
def test_the_second_rank_may_be_a_process(name: str, tmp_path: Path) -> None:
    if name == "awq":
        directory = make_model("llama", tmp_path / "float", **SIZES)
        path = write_checkpoint(directory, tmp_path / "few", *METHODS[name])
    elif name in WINDOWED:
        path = make_written(WRITTEN[name], tmp_path)[1]
    else:
        directory = make_model(name, tmp_path / "float", **EXPERTS)
        path = write_gguf(directory, tmp_path / "m.gguf", kind_of=lambda name: "Q5_K")
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in (1, 9, 30, 45)]

    async def reply(config: EngineConfig) -> list[list[int]]:
        async with AsyncEngine(config) as engine:
            asked = (tokens_of(engine, prompt, greedy(12)) for prompt in prompts)
            return list(await asyncio.gather(*asked))

    two = RunnerConfig(tensor_parallel_size=2, threads=2)
    expected = asyncio.run(reply(small_config(path)))
    assert asyncio.run(reply(small_config(path, runner=two))) == expected
