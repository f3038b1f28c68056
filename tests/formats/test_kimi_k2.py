"""Kimi K2's calls: ids that the model writes and that go back."""

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function
from aioserve.features.formats.call_block import KimiK2Parser
from tests.formats.pieces import read


def kimi(text):
    """With marks that can be typed."""
    for short, name in {
        "{{": "tool_calls_section_begin",
        "}}": "tool_calls_section_end",
        "[[": "tool_call_begin",
        "::": "tool_call_argument_begin",
        "]]": "tool_call_end",
    }.items():
        text = text.replace(short, f"<|{name}|>")
    return text


def parse(pieces):
    return read(KimiK2Parser([Function("add", {})]), pieces)


ADD = [Call("add", "functions.add:3"), Arguments('{"a": 1}')]
NEW = [Call("a.b", "functions.a.b:4"), Arguments("{}")]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (
            'Hm.{{[[functions.add:3::{"a": 1}]][[functions.a.b:4::]]}} So.',
            [Content("Hm."), *ADD, *NEW, Content("So.")],
        ),
        ('{{ [[ functions.add:3 :: {"a": 1} ]]\n}}', ADD),
        ('[[functions.add:3::{"a": 1}', ADD),
        ("{{[[add::{}]]", [Call("add"), Arguments("{}")]),
        ("{{[[add:5::{}]]", [Call("add", "add:5"), Arguments("{}")]),
        ("{{[[functions.add:3::{}", [Call("add", "functions.add:3"), Arguments("{}")]),
        ("{{[[:::{}", [Content(kimi("{{[[:::{}"))]),
        ("{{[[functions.add:3]]", [Content(kimi("{{[[functions.add:3]]"))]),
        ("{{[[functions.add:", [Content(kimi("{{[[functions.add:"))]),
        ("{{none}}", [Content(kimi("{{none}}"))]),
    ],
)
def test_the_id_of_a_call_is_that_of_the_model(text, events):
    text = kimi(text)
    assert parse([text]) == parse(list(text)) == events
