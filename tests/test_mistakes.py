"""An unknown name is answered with the one that was probably meant."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from aioserve.cli.main import main
from aioserve.config.load import set_value
from aioserve.errors import ConfigError, did_you_mean
from aioserve.support.files import read_struct
from aioserve.support.mistakes import explain


class Leaf(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="leaf"):
    colour: Annotated[Literal["green", "brown"] | None, Meta(description="of it")] = None


class Twig(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="twig"):
    length: int = 0


class Branch(msgspec.Struct, forbid_unknown_fields=True):
    parts: list[Leaf | Twig] = []
    named: dict[str, Leaf] = {}
    only: Annotated[Leaf | Twig | None, Meta(description="one")] = None


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"prats": []}, "unknown field `prats` (did you mean 'parts'?)"),
        ({"unlike": 1}, "unknown field `unlike`"),
        ({"only": {"kind": "leaf", "color": 1}}, "at `$.only` (did you mean 'colour'?)"),
        ({"parts": [{"kind": "twig", "lenght": 1}]}, "at `$.parts[0]` (did you mean 'length'?)"),
        ({"parts": [{"kind": "leef"}]}, "at `$.parts[0].kind`; expected one of leaf, twig"),
        ({"named": {"x": {"kind": "leaf", "color": 1}}}, "(did you mean 'colour'?)"),
        ({"only": {"kind": "leaf", "colour": "gren"}}, "; expected one of green, brown"),
        ({"only": {"kind": "twig", "length": "x"}}, "Expected `int`, got `str`"),
    ],
)
def test_what_was_meant_is_found_wherever_it_stands(tree: object, message: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(tree, Branch)
    found = explain(caught.value, Branch)
    assert message in found
    assert ("did you mean" in found) == ("did you mean" in message)


class Texts(msgspec.Struct, forbid_unknown_fields=True):
    version: str | None = None
    weights: dict[str, float] = {}
    number: float = 0.0


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("version: 0.24", "looks like a number as a number, unless it is in quotes"),
        ("version: 12", "looks like a number as a number, unless it is in quotes"),
        ("version: no", "YAML reads yes, no, on, off, true and false as true or false"),
        ("version: 2024-01-31", "looks like a date as a date, unless it is in quotes"),
        ("weights: {7: 2}", "looks like a number as a number, unless it is in quotes"),
        ("weights: {off: 2}", "YAML reads yes, no, on, off"),
        ("version: [a]", ""),
        ("number: a", ""),
        ("number: no", ""),
    ],
)
def test_a_text_that_yaml_reads_as_something_else_is_refused_with_the_reason(
    text: str, hint: str, tmp_path: Path
) -> None:
    path = tmp_path / "texts.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_struct(path, "file", Texts)
    assert hint in str(caught.value)
    assert ("YAML reads" in str(caught.value)) == bool(hint)


@pytest.mark.parametrize(
    "text",
    [
        'version: "0.20"',
        "version: 0.24.0",
        "version: v1",
        "version: 9e107d9d372bb6826bd81d3542a419d6",  # hashes and paths like numbers at first
        "version: 1e5/x",
        "version: 2e5:latest",
    ],
)
def test_a_text_in_quotes_or_like_no_number_is_a_text(text: str, tmp_path: Path) -> None:
    path = tmp_path / "texts.yaml"
    path.write_text(text)
    assert read_struct(path, "file", Texts).version == text.partition(" ")[2].strip('"')


def test_an_option_of_the_command_line_may_have_an_exponent_or_look_like_a_date() -> None:
    tree: dict[str, Any] = {}
    for name, text in (
        ("small", "1e-3"),
        ("large", "-2E+6"),
        ("whole", "1.e3"),
        ("point", ".5e3"),
        ("half", "1.5e3"),
        ("day", "2024-13-45"),
    ):
        set_value(tree, f"scheduler.options.{name}", text)
    options = tree["scheduler"]["options"]
    numbers = {"small": 0.001, "large": -2e6, "whole": 1e3, "point": 500.0, "half": 1500.0}
    assert options == numbers | {"day": "2024-13-45"}


def test_a_version_without_quotes_is_refused_in_a_sentence(capsys) -> None:
    words = ["compare", "fcfs", "--workload", "mixed", "--card", "h100_sxm", "--card-model", "x/y"]
    assert main([*words, "--set", "runner.profile_options.version=0.20"]) == 2
    said = capsys.readouterr().err
    assert "$.version" in said
    assert "a text that looks like a number as a number, unless it is in quotes" in said


def test_nothing_is_suggested_that_is_not_like_it() -> None:
    assert did_you_mean("max_token", ["max_tokens", "seed"]) == " (did you mean 'max_tokens'?)"
    assert did_you_mean("max_token", ["seed"]) == ""


CHOOSES_THE_CARD = "(which card is used, CUDA_VISIBLE_DEVICES in the environment says)"


@pytest.mark.parametrize(
    "words",
    [
        ["--gpu-id", "1"],
        ["--device", "cuda:1"],
        ["--set", "runner.device=cuda:1"],
        ["--set", "runner.gpu_id=1"],
    ],
)
def test_who_asks_for_a_card_by_its_number_is_told_what_chooses_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with suppress(SystemExit):
        main(words)
    assert CHOOSES_THE_CARD in capsys.readouterr().err
