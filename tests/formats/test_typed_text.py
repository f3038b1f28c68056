"""Plain text to JSON, by the schema of a tool."""

import json
from itertools import pairwise

import pytest

from aioserve.features.formats import typed_json
from aioserve.features.formats.text import forms

SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "int": {"type": "integer"},
        "number": {"type": "number"},
        "is": {"type": "boolean"},
        "list": {"type": "array"},
        "object": {"type": "object"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "choice": {"enum": [1, 2]},
        "word": {"enum": ["1", "2"]},
        "far": {"$ref": "#/$defs/far"},
        "any": {},
    },
    "$defs": {"far": {"type": "boolean"}},
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", " 5 ", " 5 "),
        ("text", 'a "b"\n', 'a "b"\n'),
        ("int", "\n5\n", 5),
        ("int", "5.0", 5),
        ("int", "5.5", "5.5"),
        ("int", "five", "five"),
        ("number", "-1e3", -1000.0),
        ("number", "NaN", "NaN"),
        ("is", "True", True),
        ("is", "false", False),
        ("list", '[1, "ä"]', [1, "ä"]),
        ("list", "[1,", "[1,"),
        ("object", '{"a": {}}', {"a": {}}),
        ("maybe", "null", None),
        ("maybe", "5", "5"),
        ("either", "5", 5),
        ("either", "x", "x"),
        ("choice", "2", 2),
        ("word", "2", "2"),
        ("far", "true", True),
        ("any", "5", 5),
        ("any", '"5"', '"5"'),
        ("unknown", "5 apples", "5 apples"),
    ],
)
def test_an_argument_has_the_type_of_its_schema(name, text, value):
    read = json.loads(typed_json(text, SCHEMA, name))
    assert (read, type(read)) == (value, type(value))


def test_a_schema_that_refers_to_itself_says_no_type():
    schema = {"properties": {"a": {"$ref": "#/properties/a"}}}
    assert typed_json("5", schema, "a") == "5"
    schema = {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 20}}}
    assert typed_json("5", schema, "a") == "5"
    assert typed_json("5", {}, "a") == "5"


def test_a_schema_is_looked_at_once_however_often_it_is_referred_to():
    names = [f"p{i}" for i in range(9)]
    chain = {
        name: {"allOf": [{"$ref": f"#/properties/{after}"} for _ in range(9)]}
        for name, after in pairwise(names)
    }
    schema = {"properties": {**chain, "p8": {"type": "boolean"}}}
    assert typed_json("true", schema, "p0") == "true"
    assert forms(schema["properties"]["p0"], schema) == [{"type": "boolean"}]
