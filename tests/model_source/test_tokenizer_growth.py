"""A tokenizer that makes a text much longer is refused where it is loaded, not in a request."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import aioserve
from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.model_source.info import ModelInfo

EMBEDDED = Path(aioserve.__file__).parent / "model_source" / "embedded"


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def model_with(path: Path, kind: str, steps: list[dict[str, Any]]) -> ModelInfo:
    """The embedded model with these steps in its tokenizer."""
    shutil.copytree(EMBEDDED, path, dirs_exist_ok=True)
    stated = json.loads((path / "tokenizer.json").read_text())
    stated[kind] = {"type": "Sequence", f"{kind}s": steps}
    (path / "tokenizer.json").write_text(json.dumps(stated))
    return ModelInfo(ModelConfig(model=str(path)))


@pytest.mark.parametrize("kind", ["normalizer", "decoder"])
@pytest.mark.parametrize(
    "steps",
    [
        [replace("a", "aa")] * 30,
        [replace("b", "aa"), replace("aa", "bbb")] * 20,
        [{"type": "Sequence", "KIND": [replace("a", "aa")] * 15}] * 2,
        [replace("e", "x" * 100_000)],
    ],
    ids=["doubled", "in turn", "nested", "at once"],
)
def test_a_tokenizer_that_multiplies_a_text_is_refused_at_load(
    tmp_path: Path, kind: str, steps: list[dict[str, Any]]
) -> None:
    steps = json.loads(json.dumps(steps).replace("KIND", f"{kind}s"))
    with pytest.raises(ConfigError, match=f"the {kind} of .* makes more than 64 characters of one"):
        _ = model_with(tmp_path, kind, steps).tokenizer


def test_a_pattern_that_multiplies_each_letter_is_refused_at_load(tmp_path: Path) -> None:
    steps = [replace("[a-z]", "zz", "Regex")] * 30
    with pytest.raises(ConfigError, match="makes more than 64 characters of one"):
        _ = model_with(tmp_path, "normalizer", steps).tokenizer


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "NFKD"}, {"type": "Lowercase"}, replace("``", '"'), replace("\n", "<n>")],
        [{"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")],
        [replace(letter, 5 * letter.upper()) for letter in "abcdefghijklmnopqrstuvwxyz"],
    ],
    ids=["words", "spaces", "letters"],
)
def test_what_tokenizers_really_replace_is_served(
    tmp_path: Path, steps: list[dict[str, Any]]
) -> None:
    assert model_with(tmp_path, "normalizer", steps).tokenizer("Hello")["input_ids"]
