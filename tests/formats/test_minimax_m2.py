"""MiniMax M2's calls: all of a reply between one pair of marks."""

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function
from aioserve.features.formats.tagged import MiniMaxM2Parser
from tests.formats.pieces import read

FUNCTIONS = [Function("add", {"properties": {"a": {"type": "number"}, "b": {"type": "string"}}})]
ONE = '<invoke name="add">\n<parameter name="a">1.5</parameter>\n</invoke>\n'
TWO = '<invoke name="add">\n<parameter name="b">"x"\n</parameter>\n</invoke>\n'
ADD = [Call("add"), Arguments('{"a": 1.5}')]
ADD_TEXT = [Call("add"), Arguments('{"b": "\\"x\\"\\n"}')]
OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"


def parse(pieces):
    return read(MiniMaxM2Parser(FUNCTIONS), pieces)


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"Hm.\n{OPEN}\n{ONE}{TWO}{CLOSE}\nSo.", [Content("Hm."), *ADD, *ADD_TEXT, Content("So.")]),
        (f"{OPEN}{ONE}{CLOSE}{OPEN}{TWO}", [*ADD, *ADD_TEXT]),
        (f"{OPEN}\n{ONE.replace('</invoke>', '')}{CLOSE}", ADD),
        (f'{OPEN}\n<invoke name="now"></invoke>{CLOSE}', [Call("now"), Arguments("{}")]),
        (f"{OPEN}\n{ONE}and then {TWO}", [*ADD, Content(f"and then {TWO}")]),
        (f"{OPEN} no {CLOSE}", [Content(f"{OPEN} no {CLOSE}")]),
        (f"a {OPEN}{CLOSE}", [Content(f"a {OPEN}{CLOSE}")]),
        (ONE, [Content(ONE)]),
    ],
)
def test_calls_of_one_block_are_read(text, events):
    assert parse([text]) == parse(list(text)) == events
