"""Calls in notations that are no JSON, bound to every kind of schema."""

import json
from typing import Any

import pytest

from aioserve.features.formats import Function, Reply, SaidCall, load_format
from tests.server.chat.test_forced_calls import compilers, takes, using  # noqa: F401

SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "code": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 4},
        "n": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"enum": ["a", 1, None]}, "maxItems": 2},
        "o": {"$ref": "#/$defs/o"},
        "free": {},
        "maybe": {"type": ["number", "null"]},
        "of": {"allOf": [{"$ref": "#/$defs/o"}], "description": "as pydantic writes it"},
        "one": {"anyOf": [{"$ref": "#/$defs/o"}, {"items": {"type": "integer"}}]},
    },
    "required": ["text", "n"],
    "$defs": {
        "o": {
            "type": "object",
            "properties": {
                "o": {"anyOf": [{"$ref": "#/$defs/o"}, {"type": "null"}]},
                "is_it": {"type": "boolean"},
                "all": {"allOf": [{"$ref": "#/$defs/o"}]},
            },
            "additionalProperties": False,
        }
    },
}
GOOD = [
    {"text": "", "n": 0},
    {"text": 'so "ä" it\'s', "code": "abc", "n": 7, "tags": ["a", None]},
    {"text": "x", "n": 1, "o": {"o": {"is_it": True}}, "free": {"k": [1, "b", {}]}, "maybe": None},
    {"text": "x", "n": 1, "tags": [], "o": {}, "free": "y", "maybe": -0.5},
    {"text": "x", "n": 1, "of": {"is_it": False}, "one": {"is_it": True}},
    {"text": "x", "n": 1, "of": {"all": {"o": {"o": None}}}, "one": [1, 2]},
]
BAD = [
    {"text": "x"},
    {"text": 5, "n": 1},
    {"text": "x", "n": -1},
    {"text": "x", "n": 1, "code": "ABC"},
    {"text": "x", "n": 1, "code": "abcde"},
    {"text": "x", "n": 1, "tags": ["a", "a", "a"]},
    {"text": "x", "n": 1, "tags": ["b"]},
    {"text": "x", "n": 1, "o": {"o": {"is_it": 1}}},
    {"text": "x", "n": 1, "o": {"x": 1}},
    {"text": "x", "n": 1, "maybe": "5"},
    {"text": "x", "n": 1, "other": 1},
    {"text": "x", "n": 1, "of": {"is_it": 1}},
    {"text": "x", "n": 1, "of": 5},
    {"text": "x", "n": 1, "one": ["a"]},
]
TOOL = {"type": "function", "function": {"name": "do", "parameters": SCHEMA}}
PARSERS = {"gemma4": '<|"|>', "lfm2": "<|tool_call_start|>", "olmo3": "</function_calls>"}
PARSERS["llama4_pythonic"] = "<|python_start|>"


@pytest.mark.parametrize("parser", PARSERS)
async def test_arguments_keep_to_their_schema(takes, parser):  # noqa: F811
    for special in ("<|pad|>", PARSERS[parser]):
        for choice, strict in (("required", None), ("auto", True)):
            use = using(TOOL, choice=choice, **({"strict": True} if strict else {}))
            for given, is_good in [*((each, True) for each in GOOD), *((e, False) for e in BAD)]:
                in_order = {key: given[key] for key in SCHEMA["properties"] if key in given}
                call = SaidCall("do", {**in_order, **given})
                text = load_format(parser).write(Reply(calls=[call]))
                taken = await takes(text, parser, "none", special=special, use=use)
                assert taken == is_good, (text, choice, special)


SELF = {"type": "object", "anyOf": [{"$ref": "#"}, {"$ref": "#"}], "properties": {"a": {}}}
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"a": DEEP}}


@pytest.mark.parametrize("parser", PARSERS)
def test_no_schema_takes_long_or_raises(parser):
    for schema in (SELF, DEEP, {"properties": {"a": SELF}, **SELF}, {"allOf": [{"$ref": "#"}] * 3}):
        rules = load_format(parser).grammar([Function("do", schema)], True, json.dumps)
        assert len(rules) < 1_000_000
