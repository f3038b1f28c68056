"""A model is read as an earlier start has laid it out, where nothing differs, and else anew."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.model_source.info import ModelInfo
from aioserve.params import SamplingParams
from aioserve.runner.cpu import machine, models, prepared
from aioserve.runner.cpu.load import load_on_cpu
from tests.adapters import make_adapter
from tests.gguf_models import write_gguf
from tests.models import make_model
from tests.processes import PATIENCE
from tests.runner.driver import BLOCK_SIZE, NUM_BLOCKS, Driver, make_config
from tests.runner.test_adapted_models import AdaptedDriver

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
READ = "as it was laid out in"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which models are kept; nothing is kept without compiled kernels."""
    try:
        load_kernels()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "aioserve" / "prepared"


@pytest.fixture
def tokens_of(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Any]]:
    """`tokens_of(config)`: greedy tokens with their logprobs, and whether the model was read as it
    had been prepared.
    """
    runners = []

    def generate(config: EngineConfig) -> tuple[list[int], list[float], bool]:
        caplog.clear()
        caplog.set_level(logging.INFO)
        runner = load_on_cpu(config, ModelInfo(config.model))
        runners.append(runner)
        driver = Driver(runner, NUM_BLOCKS, BLOCK_SIZE)
        driver.add("a", PROMPT, SamplingParams(temperature=0.0, logprobs=3))
        tokens = driver.generate("a", 12)
        logprobs = [
            number for entry in driver.sequences["a"].logprobs for number in entry.top_logprobs
        ]
        return tokens, logprobs, READ in caplog.text

    yield generate
    for runner in runners:
        runner.close()


def config_of(path: Path, **model: Any) -> EngineConfig:
    return make_config(path, **{"keep_prepared": True, **model})


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen2", "mistral", "gguf", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_was_prepared_gives_the_same_logits_to_the_bit(
    kind: str, dtype: str, tmp_path: Path, tokens_of: Callable[..., Any], own_cache: Path
) -> None:
    path = make_model("llama" if kind in ("gguf", "int8") else kind, tmp_path / "model")
    if kind == "gguf":
        path = write_gguf(path, tmp_path / "model.gguf")
    config = config_of(path, dtype=dtype, quantization="int8" if kind == "int8" else None)
    *first, was_read = tokens_of(config)
    assert not was_read
    (file,) = own_cache.iterdir()
    assert (file.stat().st_mode & 0o777, own_cache.stat().st_mode & 0o777) == (0o600, 0o700)
    *again, was_read = tokens_of(config)
    assert was_read
    assert again == first


@pytest.mark.slow
def test_a_prepared_model_is_read_without_transformers(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path / "model")
    script = (
        "import sys\n"
        "from aioserve import EngineConfig\n"
        "from aioserve.config import ModelConfig\n"
        "from aioserve.model_source.info import ModelInfo\n"
        "from aioserve.runner.cpu.load import load_on_cpu\n"
        f"config = EngineConfig(model=ModelConfig(model={str(path)!r}))\n"
        "load_on_cpu(config, ModelInfo(config.model)).close()\n"
        "print('transformers.modeling_utils' in sys.modules)\n"
    )
    for expected in ("True", "False"):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.stdout.strip() == expected, done.stderr


def test_other_weights_or_settings_are_another_model(
    tmp_path: Path, tokens_of: Callable[..., Any], own_cache: Path
) -> None:
    path = make_model("llama", tmp_path / "model")
    first = tokens_of(config_of(path))
    assert not tokens_of(config_of(path, max_model_len=64))[2]
    assert not tokens_of(config_of(path, quantization="int8"))[2]
    assert not tokens_of(config_of(path, fused=False))[2]
    assert len(list(own_cache.iterdir())) == 3
    weights = path / "model.safetensors"
    data, times = bytearray(weights.read_bytes()), weights.stat()
    data[-2000:] = bytes(2000)
    weights.write_bytes(data)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if nothing had happened
    other = tokens_of(config_of(path))
    assert not other[2]
    assert other[1] != first[1]
    assert len(list(own_cache.iterdir())) == 3  # it has taken the place of the old one
    assert tokens_of(config_of(path)) == (*other[:2], True)


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "head"])
def test_a_damaged_file_is_done_without(
    damage: str, tmp_path: Path, tokens_of: Callable[..., Any], own_cache: Path
) -> None:
    config = config_of(make_model("llama", tmp_path / "model"))
    *first, _ = tokens_of(config)
    (file,) = own_cache.iterdir()
    data = file.read_bytes()
    damaged = {
        "cut": data[: len(data) // 2],
        "empty": b"",
        "foreign": b"GGUF" + data[4:],
        "head": data[:40] + bytes(60) + data[100:],
    }
    file.write_bytes(damaged[damage])
    *again, was_read = tokens_of(config)
    assert (again, was_read) == (first, False)
    assert tokens_of(config)[2]  # it was written anew


def test_nothing_is_kept_unasked_or_of_a_kind_that_is_not_written(
    tmp_path: Path,
    tokens_of: Callable[..., Any],
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make_model("llama", tmp_path / "model")
    tokens_of(config_of(path, keep_prepared=False))
    tokens_of(config_of(make_model("mixtral", tmp_path / "experts")))
    monkeypatch.setattr(prepared, "MOST_BYTES", 1000)
    tokens_of(config_of(path))
    assert not own_cache.exists()


def test_a_folder_that_cannot_be_written_is_one_line(
    tmp_path: Path,
    tokens_of: Callable[..., Any],
    own_cache: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    own_cache.parent.parent.mkdir()
    own_cache.parent.write_text("no folder")
    config = config_of(make_model("llama", tmp_path / "model"))
    assert not tokens_of(config)[2]
    (line,) = [line for line in caplog.messages if "is not kept for the next start" in line]
    assert "Not a directory" in line


def test_a_model_with_a_part_that_cannot_be_written_is_served_and_not_kept(
    tmp_path: Path,
    tokens_of: Callable[..., Any],
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = config_of(make_model("llama", tmp_path / "model"))
    layer = prepared._layer_state
    with monkeypatch.context() as patch:
        patch.setattr(
            prepared,
            "_layer_state",
            lambda own: msgspec.structs.replace(layer(own), activation=object()),
        )
        first = tokens_of(config)
        assert [line for line in caplog.messages if "is not kept for the next start" in line]
    assert not own_cache.exists()
    assert tokens_of(config) == first


def test_without_kernels_or_a_home_a_model_is_served_all_the_same(
    tmp_path: Path, tokens_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(make_model("llama", tmp_path / "model"))
    first = tokens_of(config)

    def unavailable() -> None:
        raise KernelsUnavailableError("planted")

    def homeless(name: str) -> Path:
        raise RuntimeError("Could not determine home directory.")

    prepared._made_by.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "load_kernels", unavailable)
        assert tokens_of(config) == first
    with monkeypatch.context() as patch:
        patch.setattr(prepared, "user_cache", homeless)
        assert tokens_of(config) == first
    assert tokens_of(config)[2]


def test_what_was_read_longest_ago_makes_room(
    tmp_path: Path,
    tokens_of: Callable[..., Any],
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [make_model("llama", tmp_path / name) for name in ("a", "b", "c")]
    tokens_of(config_of(paths[0]))
    (file,) = own_cache.iterdir()
    monkeypatch.setattr(prepared, "MOST_BYTES_IN_ALL", int(2.5 * file.stat().st_size))
    tokens_of(config_of(paths[1]))
    (other,) = set(own_cache.iterdir()) - {file}
    os.utime(other, (1, 1))
    (own_cache / ".writing-a").touch()
    os.utime(own_cache / ".writing-a", (1, 1))  # of a process that was killed
    tokens_of(config_of(paths[0]))  # which is read, and so stays
    tokens_of(config_of(paths[2]))
    assert file.exists()
    assert not other.exists()
    assert len(list(own_cache.iterdir())) == 2


def test_too_little_memory_for_a_prepared_model_is_said_with_numbers(
    tmp_path: Path, tokens_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(make_model("llama", tmp_path / "model", hidden_size=512))
    tokens_of(config)
    monkeypatch.setattr(machine, "available_memory", lambda: 1 << 20)
    monkeypatch.setattr(models, "load_model_on_cpu", lambda *_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"too little memory: \d+ MiB for the weights and "):
        tokens_of(config)


def test_an_adapter_is_served_on_a_prepared_model(
    tmp_path: Path, tokens_of: Callable[..., Any]
) -> None:
    path = make_model("llama", tmp_path / "model")
    adapter = make_adapter(path, tmp_path / "adapter")
    plain = tokens_of(config_of(path))[0]
    found = []
    for keeps in (False, True):
        config = config_of(path, keep_prepared=keeps)
        runner = load_on_cpu(config, ModelInfo(config.model))
        driver = AdaptedDriver(Driver(runner, NUM_BLOCKS, BLOCK_SIZE), {"own": adapter})
        driver.add("own-0", PROMPT)
        found.append(driver.generate("own-0", 12))
        runner.close()
    assert found[0] == found[1] != plain
