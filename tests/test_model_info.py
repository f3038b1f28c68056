"""Facts of a model directory are those that transformers would tell, read without it."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.model_info import ModelInfo, find_model

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
    tokenizer = model_info(folder, **{**config, "model_type": model_type}).tokenizer
    chosen = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer) is type(chosen)
    assert tokenizer.init_kwargs == chosen.init_kwargs
    assert tokenizer.backend_tokenizer.to_str() == chosen.backend_tokenizer.to_str()
