"""JSON calls behind a mark: Granite 3, Nemotron 2, Phi-4-mini."""

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function, choose
from aioserve.features.formats.json_formats import (
    AprielParser,
    GraniteParser,
    HermesParser,
    NemotronParser,
    Phi4Parser,
)
from tests.formats.pieces import read_alike

FUNCTIONS = [Function(name, {"type": "object"}) for name in ("add", "get_weather")]
ADD = [Call("add"), Arguments('{"a": 1}')]
WEATHER = [Call("get_weather"), Arguments('{"city": "]</TOOLCALL>ä"}')]
TWO = (
    '[{"name": "add", "arguments": {"a": 1}}, '
    '{"arguments": {"city": "]</TOOLCALL>ä"}, "name": "get_weather"}]'
)
ONE = '{"name": "add", "arguments": {"a": 1}}'


CASES = [
    (
        NemotronParser,
        f"Let me see.\n<TOOLCALL>{TWO}</TOOLCALL>Done.",
        [Content("Let me see."), *ADD, *WEATHER, Content("Done.")],
        0,
    ),
    (NemotronParser, f"<TOOLCALL> [ {ONE} ] </TOOL", ADD, 0),
    (NemotronParser, "<TOOLCALL>[]</TOOLCALL>", [Content("<TOOLCALL>[]</TOOLCALL>")], 1),
    (NemotronParser, f"<TOOLCALL>[{ONE}, 5]", [*ADD, Content(", 5]")], 1),
    (NemotronParser, f"<TOOLCALL>[{ONE}, {ONE[:20]}", [*ADD, Call("add")], 0),
    (GraniteParser, f"<|tool_call|>{TWO}\nSo.", [*ADD, *WEATHER, Content("So.")], 0),
    (GraniteParser, f"<tool_call>{TWO}", [*ADD, *WEATHER], 0),
    (
        AprielParser,
        f"Hm.\n<tool_calls>{TWO}</tool_calls> So.",
        [Content("Hm."), *ADD, *WEATHER, Content("So.")],
        0,
    ),
    (AprielParser, "<tool_calls> a </tool_calls>", [Content("<tool_calls> a </tool_calls>")], 1),
    (GraniteParser, "a <|tool_call|> b", [Content("a <|tool_call|> b")], 1),
    (
        Phi4Parser,
        f"<|tool_call|>{TWO}<|/tool_call|><|tool_call|>{ONE}<|/tool_call|>",
        [*ADD, *WEATHER, *ADD],
        0,
    ),
    (Phi4Parser, f"functools{TWO}", [*ADD, *WEATHER], 0),
    (Phi4Parser, "import functools", [Content("import functools")], 0),
]


@pytest.mark.parametrize(("parser", "text", "events", "num"), CASES, ids=range(len(CASES)))
def test_a_reply_is_read_alike_however_it_is_cut(parser, text, events, num):
    assert read_alike(lambda: parser(FUNCTIONS), text) == (events, num)


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("<TOOLCALL> </TOOLCALL>", NemotronParser),
        ("within <tool_calls></tool_calls>: <tool_calls>[ or <tool_call>", AprielParser),
        ("respond only with <|tool_call|> followed by a JSON list", GraniteParser),
        ("<|tool_call|> <|/tool_call|>", Phi4Parser),
        ("<|tool|> <|/tool|>", Phi4Parser),
        ("tools functools[", Phi4Parser),
        ("<|start_header_id|> tools functools[", None),
        ("<|start_of_role|> <tool_call>", HermesParser),  # Granite 4
    ],
)
def test_each_is_chosen_by_its_template(template, parser):
    assert choose("auto", "auto", template).format is parser
