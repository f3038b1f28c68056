"""What is wrong in a YAML file is one line that says which file, and where in it."""

from pathlib import Path

import msgspec
import pytest

from aioserve.errors import ConfigError
from aioserve.support.files import read_struct


class Pair(msgspec.Struct, forbid_unknown_fields=True):
    left: int
    right: int = 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"left: [\n", r"pair .*/x\.yaml:2:1: not valid YAML: did not find expected node content"),
        (b"left: 1\n right: 2\n", r"pair .*/x\.yaml:2:7: not valid YAML: mapping values are not"),
        (b"\0\1", r"pair .*/x\.yaml: not valid YAML: control characters are not allowed"),
        (b"\xff", r"pair .*/x\.yaml: not valid YAML: invalid start byte"),
        (b"- left", r"pair .*/x\.yaml: Expected `object`, got `array`"),
        (b"left: 1\nrigth: 2", r"pair .*/x\.yaml: .*`rigth` \(did you mean 'right'\?\)"),
        (b"left: one", r"pair .*/x\.yaml: Expected `int`, got `str` - at `\$\.left`"),
    ],
)
def test_it_says_where(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_struct(path, "pair", Pair)
    assert "\n" not in str(caught.value)
    assert "string>" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read pair nowhere\.yaml: No such file"):
        read_struct(Path("nowhere.yaml"), "pair", Pair)


def test_what_is_right_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("left: 1 # and nothing else")
    assert read_struct(path, "pair", Pair) == Pair(1)
