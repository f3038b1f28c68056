"""An unknown name is answered with the one that was probably meant."""

from contextlib import suppress
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from aioserve.cli.main import main
from aioserve.errors import did_you_mean
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
