"""Calls whose arguments are no JSON: in Gemma 4's notation, and in Python's."""

import json

import pytest

from aioserve.features.formats import (
    Arguments,
    Call,
    Content,
    Function,
    Reasoning,
    Reply,
    SaidCall,
    choose,
)
from aioserve.features.formats.json_formats import Llama4JsonParser
from aioserve.features.formats.notation import GEMMA, PYTHON, NotedArguments
from aioserve.features.formats.noted_calls import (
    Gemma4Parser,
    Lfm2Parser,
    Llama4PythonicParser,
    Olmo3Parser,
)
from tests.formats.pieces import read_alike

SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "is_it": {"type": "boolean"},
        "tags": {"type": "array"},
        "zip": {"type": "string"},
    },
}
FUNCTIONS = [Function(name, SCHEMA) for name in ("add", "get_weather")]


ADD = [Call("add"), Arguments('{"n": 1}')]
NOTHING = [Call("get_weather"), Arguments("{}")]
Q = '<|"|>'
CASES = [
    (
        Gemma4Parser,
        f"Let me see.<|tool_call>call:add{{city:{Q}Rom "
        f'"ä", {{x}}{Q},n:1,o:{{k:[true,null,{Q}{Q}]}}}}'
        "<tool_call|><|tool_call>call:get_weather{}<tool_call|>Done.",
        [
            Content("Let me see."),
            Call("add"),
            Arguments('{"city": "Rom \\"ä\\", {x}", "n": 1, "o": {"k": [true, null, ""]}}'),
            *NOTHING,
            Content("Done."),
        ],
    ),
    (Gemma4Parser, "a <|tool_call>call:5", [Content("a <|tool_call>call:5")]),
    (Gemma4Parser, "<|tool_call>{}<tool_call|>", [Content("<|tool_call>{}<tool_call|>")]),
    (
        Lfm2Parser,
        "So.<|tool_call_start|>[add(n=1), get_weather()]<|tool_call_end|>Done.",
        [Content("So."), *ADD, *NOTHING, Content("Done.")],
    ),
    (
        Lfm2Parser,
        '<|tool_call_start|>[{"name": "add", "arguments": {"n": 1}}]<|tool_call_end|>',
        ADD,
    ),
    (
        Lfm2Parser,
        '<|tool_call_start|>[add(text=\'it\'s "so"\', code="""x = "y"\n""")]',
        [Call("add"), Arguments('{"text": "it\'s \\"so\\"", "code": "x = \\"y\\"\\n"}')],
    ),
    (Lfm2Parser, "<|tool_call_start|>[]x", [Content("<|tool_call_start|>[]x")]),
    (
        Olmo3Parser,
        "So.\n<function_calls>\nadd(n=1)\nget_weather()\n</function_calls>",
        [Content("So."), *ADD, *NOTHING],
    ),
    (Llama4PythonicParser, " [add(n=1), get_weather()]", [*ADD, *NOTHING]),
    (
        Llama4PythonicParser,
        "So: <|python_start|>[new(a={'b': (1, 2.5)})]<|python_end|>",
        [Content("So:"), Call("new"), Arguments('{"a": {"b": [1, 2.5]}}')],
    ),
    # Without a mark, only tools are called.
    (Llama4PythonicParser, "[new(n=1)]", [Content("[new(n=1)]")]),
    (Llama4PythonicParser, "[1] says so.", [Content("[1] says so.")]),
    (Llama4PythonicParser, "So: [add(n=1)]", [Content("So: [add(n=1)]")]),
    # What goes wrong in the arguments is told as far as it goes.
    (Llama4PythonicParser, "[add(n=1 1=)]", [Call("add"), Arguments('{"n": "1 1'), Content("=)]")]),
    (Lfm2Parser, "<|tool_call_start|>[add(n=", [Call("add"), Arguments('{"n": ')]),
    (
        Llama4JsonParser,
        '{"name": "add", "parameters": {"n": 1}}{"name": "get_weather", "parameters": {}}',
        [*ADD, *NOTHING],
    ),
]


@pytest.mark.parametrize(("parser", "text", "events"), CASES, ids=range(len(CASES)))
def test_a_reply_is_read_alike_however_it_is_cut(parser, text, events):
    assert read_alike(lambda: parser(FUNCTIONS), text)[0] == events


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=True, b=False, c=None)", {"a": True, "b": False, "c": None}),
        ("a=true, b=null)", {"a": True, "b": None}),
        ("a=-1.5e3, b=.5, c=5., d=1_000, e=0x1F, f=007, g=+3)",
         {"a": -1500, "b": 0.5, "c": 5, "d": 1000, "e": 31, "f": 7, "g": 3}),
        (r"""a="\n\t\\\"\x41\u00e4\U0001F600\101\q\'" )""", {"a": "\n\t\\\"Aä😀A\\q'"}),
        ("a='\\\n')", {"a": ""}),
        ("a=[[1, (2,)], {'k': {}}, []],)", {"a": [[1, [2]], {"k": {}}, []]}),
        ("a={'x': 'it's', \"y\": 1})", {"a": {"x": "it's", "y": 1}}),
        ("a=inf, b=some words)", {"a": "inf", "b": "some words"}),
        # Typed by the schema, where the model wrote a text.
        ("n='5', is_it='True', tags='[1, 2]', zip='02134')",
         {"n": 5, "is_it": True, "tags": [1, 2], "zip": "02134"}),
    ],
)  # fmt: skip
def test_python_literals_become_json(text, value):
    for pieces in ([text], list(text)):
        reader, rest = NotedArguments(PYTHON, SCHEMA), ""
        for piece in pieces:
            rest += piece
            rest = rest[reader.feed(rest, 0, False) :]
        assert reader.is_done
        assert json.loads("".join(reader.told)) == value


def test_gemma_cannot_write_its_own_quotes():
    with pytest.raises(ValueError, match="in it cannot be written"):
        Gemma4Parser.write(Reply(calls=[SaidCall("add", {"a": GEMMA.quote})]))
    with pytest.raises(ValueError, match="cannot stand without quotes"):
        Gemma4Parser.write(Reply(calls=[SaidCall("add", {"a": {"b:": 1}})]))


def test_gemma_thinks_in_a_channel():
    choice = choose("auto", "auto", "<|tool_call>call: <|channel>thought <channel|>")
    assert choice.format is Gemma4Parser
    assert choice.marks == Gemma4Parser.marks


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("<|tool_call_start|>", Lfm2Parser),
        ("<|tool_list_start|>", Lfm2Parser),
        ("<function_calls>", Olmo3Parser),
        ("<|header_start|> tools [func_name1(param1=value1", Llama4PythonicParser),
        ("<|header_start|> tools", Llama4JsonParser),
    ],
)
def test_each_is_chosen_by_its_template(template, parser):
    assert choose("auto", "auto", template).format is parser


def test_lfm_thinks_only_if_it_says_so():
    assert choose("auto", "auto", "List of tools: [ </think>").marks == Lfm2Parser.marks
    reading = Lfm2Parser(FUNCTIONS)
    assert not any(isinstance(event, Reasoning) for event in reading.append("Ay."))


def test_a_schema_that_many_parts_refer_to_is_read_once():
    """Looked at for each of them, it would be looked at 300 ** 4 times."""
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 300} for i in range(9)}
    schema = {
        "type": "object",
        "$defs": {**chain, "d3": {"type": "object", "required": ["b"]}},
        "properties": {"a": {"$ref": "#/$defs/d0", "minProperties": 1}},
    }
    assert '"b:"' in Gemma4Parser.grammar([Function("f", schema)], True, json.dumps)


def test_a_schema_whose_rules_would_take_megabytes_is_refused():
    big = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}}
    properties = {f"q{i}": {"$ref": "#/$defs/big", "minProperties": i} for i in range(300)}
    schema = {"type": "object", "$defs": {"big": big}, "properties": properties}
    with pytest.raises(ValueError, match="more than 262,144 characters"):
        Lfm2Parser.grammar([Function("f", schema)], True, json.dumps)
