"""JSON calls behind a mark: Granite 3, Nemotron 2, Phi-4-mini."""

import random

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function, choose, joined
from aioserve.features.formats.marked_json import (
    AprielParser,
    GraniteParser,
    HermesParser,
    NemotronParser,
    Phi4Parser,
)

FUNCTIONS = [Function(name, {"type": "object"}) for name in ("add", "get_weather")]
ADD = [Call("add"), Arguments('{"a": 1}')]
WEATHER = [Call("get_weather"), Arguments('{"city": "]</TOOLCALL>ä"}')]
TWO = (
    '[{"name": "add", "arguments": {"a": 1}}, '
    '{"arguments": {"city": "]</TOOLCALL>ä"}, "name": "get_weather"}]'
)
ONE = '{"name": "add", "arguments": {"a": 1}}'


def parse(parser, pieces):
    reader = parser(FUNCTIONS)
    events = [event for piece in pieces for event in reader.append(piece)]
    return joined(events + reader.flush()), reader.num_malformed


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
    assert parse(parser, [text]) == (events, num)
    assert parse(parser, list(text)) == (events, num)
    rng = random.Random(0)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=4))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(parser, pieces) == (events, num)


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
