"""Facts of a model directory are those that transformers would tell, read without it."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.model_source.info import ModelInfo, find_model

EMBEDDED = find_model(ModelConfig()).path


def model_info(folder: Path, **config: object) -> ModelInfo:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelInfo(ModelConfig(model=str(folder)))


def test_the_embedded_model_has_the_facts_that_transformers_reads() -> None:
    info, config = ModelInfo(ModelConfig()), AutoConfig.from_pretrained(EMBEDDED)
    assert info.vocab_size == config.vocab_size
    assert info.max_model_len == config.max_position_embeddings
    eos = GenerationConfig.from_pretrained(EMBEDDED).eos_token_id
    assert info.eos_token_ids == (tuple(eos) if isinstance(eos, list) else (eos,))


def test_what_the_file_leaves_out_has_the_default_of_the_architecture(tmp_path: Path) -> None:
    info = model_info(tmp_path, model_type="llama", eos_token_id=[3, 4])
    default = AutoConfig.for_model("llama")
    assert (info.vocab_size, info.max_model_len) == (
        default.vocab_size,
        default.max_position_embeddings,
    )
    assert info.eos_token_ids == (3, 4)


def test_of_a_model_with_parts_the_text_model_counts(tmp_path: Path) -> None:
    text = {"model_type": "llama", "vocab_size": 77, "max_position_embeddings": 55}
    info = model_info(tmp_path, model_type="llava", vocab_size=5, text_config=text)
    assert (info.vocab_size, info.max_model_len) == (77, 55)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    for file in ("config.json", "generation_config.json"):
        shutil.copy(EMBEDDED / file, tmp_path)
    (tmp_path / name).write_text("{")
    info = ModelInfo(ModelConfig(model=str(tmp_path)))
    with pytest.raises(ConfigError, match=f"cannot read .*{name}"):
        _ = (info.vocab_size, info.eos_token_ids)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"eos_token_id": "three"}, "eos_token_id"),
        ({"eos_token_id": [[3]]}, "eos_token_id"),
        ({"matryoshka_dimensions": 5}, "matryoshka_dimensions"),
        ({"matryoshka_dimensions": [64, "all"]}, "matryoshka_dimensions"),
    ],
)
def test_a_field_of_another_type_is_named(tmp_path: Path, fields: Any, name: str) -> None:
    info = model_info(tmp_path, model_type="llama", **fields)
    with pytest.raises(ConfigError, match=f"{name} of .* cannot be: Expected"):
        _ = (info.eos_token_ids, info.matryoshka_dimensions)


def test_a_request_for_shorter_vectors_loads_no_heavy_library() -> None:
    code = (
        "import sys\n"
        "from aioserve.config import ModelConfig\n"
        "from aioserve.model_source.info import ModelInfo\n"
        "assert not ModelInfo(ModelConfig()).matryoshka_dimensions\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.parametrize("weight_map", [5, ["a.safetensors"], {"a": 5}, {"a": None}, None])
def test_an_index_of_weights_of_another_type_is_named(tmp_path: Path, weight_map: Any) -> None:
    info = model_info(tmp_path, model_type="llama")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=f"cannot read {index}: Expected") as caught:
        info.source.num_bytes(4)
    assert "\n" not in str(caught.value)


def put_fifo(path: Path) -> str:
    os.mkfifo(path)
    return "a FIFO"


def put_socket(path: Path) -> str:
    with socket.socket(socket.AF_UNIX) as sock:
        os.chdir(path.parent)  # its path may be longer than an address
        sock.bind(path.name)
    return "a socket"


def put_device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "a device"


@pytest.mark.parametrize("put", [put_fifo, put_socket, put_device])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "1_Pooling/config.json"]
)
def test_what_is_no_file_in_a_model_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Any, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(EMBEDDED / "config.json", tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    kind = put(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{tmp_path / name} is {kind}, not a file"):
        ModelInfo(ModelConfig(model=str(tmp_path)))


@pytest.mark.parametrize("put", [put_fifo, put_socket, put_device])
def test_what_is_no_file_is_no_model_and_no_part_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    kind = put(tmp_path / "no_file")
    with pytest.raises(ConfigError, match=f"no_file is {kind}, not a file"):
        ModelInfo(ModelConfig(model=str(tmp_path / "no_file")))
    folder = tmp_path / "model"
    folder.mkdir()
    info = model_info(folder, model_type="llama")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../no_file"}}))
    with pytest.raises(ConfigError, match=f"no_file is {kind}, not a file"):
        info.source.num_bytes(4)


def test_a_tokenizer_that_is_switched_off_is_refused() -> None:
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        _ = ModelInfo(ModelConfig(skip_tokenizer_init=True)).tokenizer


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2"]
)  # one read without AutoTokenizer, one by it
def test_the_tokenizer_is_the_one_that_transformers_would_choose(
    tmp_path: Path, model_type: str
) -> None:
    folder = Path(shutil.copytree(EMBEDDED, tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    tokenizer = model_info(folder, **{**config, "model_type": model_type}).source.read_tokenizer()
    chosen = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer) is type(chosen)
    assert tokenizer.init_kwargs == chosen.init_kwargs
    assert tokenizer.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()


WRONG_VALUES: list[tuple[str, Any, str]] = [
    *((name, value, "a whole number of at least 1")
      for name in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads",
                   "num_key_value_heads", "head_dim", "max_position_embeddings")
      for value in (0, -1, 1.5, "8", True, 2**70)),
    ("intermediate_size", -4, "a whole number of at least 0"),
    ("intermediate_size", [64, "x"], "a whole number of at least 0"),
    ("num_experts_per_tok", "two", "a whole number of at least 0"),
    *(("rms_norm_eps", value, "a number above 0") for value in (0, -1e-5, "1e-5", False, [])),
    *(("rope_theta", value, "a number above 0") for value in (0, 0.0, -1e4, "1e4", {}, True)),
    ("sliding_window", -1, "a whole number of at least 0"),
    ("final_logit_softcapping", -1, "a number of at least 0"),
    *(("partial_rotary_factor", value, "a number above 0 and of at most 1")
      for value in (0, -0.5, 1.5, "all")),
    ("embedding_multiplier", "big", "a finite number"),
]  # fmt: skip


@pytest.mark.parametrize("part", [None, "text_config"])
def test_what_no_model_can_state_is_refused_by_field_value_and_what_is_expected(
    tmp_path: Path, part: str | None
) -> None:
    good = json.loads((EMBEDDED / "config.json").read_text())
    for number, (name, value, expected) in enumerate(WRONG_VALUES):
        (folder := tmp_path / str(number)).mkdir()
        config = good | {name: value}
        info = model_info(folder, **(config if part is None else {part: config}))
        wrong = value[-1] if isinstance(value, list) and value else value
        where = f"config.json: {part}: {name}" if part else f"config.json: {name}"
        with pytest.raises(ConfigError) as caught:
            _ = info.max_model_len
        assert f"{where} is {wrong!r}, which must be {expected}" in str(caught.value)
        with pytest.raises(ConfigError, match="which must be"):
            info.source.read_config()


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
WRONG_ROPES: list[tuple[Any, str]] = [
    (7, "rope_scaling is 7, which must be an object or null"),
    ([], "rope_scaling is [], which must be an object or null"),
    ("linear", "rope_scaling is 'linear', which must be an object or null"),
    ({"type": 5}, "rope_scaling: type is 5, which must be a string"),
    ({"type": "linear"}, "rope_scaling: rope_type is 'linear', which needs factor"),
    ({"rope_type": "linear", "factor": 0}, "factor is 0, which must be a number above 0"),
    ({"rope_type": "linear", "factor": "2"}, "factor is '2', which must be a number above 0"),
    ({"rope_type": "yarn", "factor": 4, "beta_fast": -1}, "beta_fast is -1, which must be"),
    ({"rope_type": "yarn", "factor": 4, "mscale": "x"}, "mscale is 'x', which must be"),
    (LLAMA3, "rope_type is 'llama3', which needs original_max_position_embeddings"),
    (
        LLAMA3 | {"original_max_position_embeddings": 64, "high_freq_factor": 1},
        "high_freq_factor is 1, which must be above low_freq_factor, 1",
    ),
    ({"rope_type": "longrope", "long_factor": [1.0]}, "which needs short_factor"),
    (
        {"rope_type": "longrope", "long_factor": [1.0, 0], "short_factor": [1.0]},
        "long_factor is 0, which must be a number above 0",
    ),
    (
        {"rope_type": "longrope", "long_factor": 4, "short_factor": [1.0]},
        "long_factor is 4, which must be a list",
    ),
    ({"full_attention": {"rope_theta": 0}}, "rope_scaling.full_attention: rope_theta is 0, which"),
    ({"rope_type": "wavy", "factor": 2}, "rope_scaling: rope_type is 'wavy', which must be one of"),
]


@pytest.mark.parametrize(("rope", "words"), WRONG_ROPES)
def test_what_no_rope_scaling_can_state_is_refused_by_name(
    tmp_path: Path, rope: Any, words: str
) -> None:
    config = json.loads((EMBEDDED / "config.json").read_text()) | {"rope_scaling": rope}
    with pytest.raises(ConfigError) as caught:
        _ = model_info(tmp_path, **config).vocab_size
    assert words in str(caught.value)
    assert "config.json: rope_scaling" in str(caught.value)
