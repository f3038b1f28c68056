"""Seed-OSS's calls and reasoning, with values as Python prints them."""

import json

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function
from aioserve.features.formats.tagged import SeedOssParser
from tests.formats.pieces import read

SCHEMA = {"properties": {"a": {"type": "object"}, "b": {"type": "string"}, "c": {"type": "array"}}}


def parse(pieces):
    return read(SeedOssParser([Function("add", SCHEMA)]), pieces)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("a", "{'x': [True, None, 1.5], 'y': \"it's\"}", {"x": [True, None, 1.5], "y": "it's"}),
        ("a", '{"x": true}', {"x": True}),
        ("a", "{'x': f()}", "{'x': f()}"),
        ("b", "\n['x']\n", "\n['x']\n"),
        ("c", "('x', 1)", "('x', 1)"),
        ("c", "['\\d', 1e999]", "['\\d', 1e999]"),
    ],
)
def test_a_value_is_json_or_what_python_prints(key, text, value):
    call = f"<function=add>\n<parameter={key}>{text}</parameter>\n</function>"
    for written in (f"<seed:tool_call>\n{call}\n</seed:tool_call>", call):
        events = parse(list(written))
        assert parse([written]) == events
        assert events[0] == Call("add")
        assert json.loads(events[1].text) == {key: value}


def test_text_and_unknown_tags_are_content():
    text = "<seed:tool_call>\n<function=add>\n</function>\n</seed:tool_call>"
    assert parse(f"Hm.\n\n{text} So.")[0::3] == [Content("Hm."), Content("So.")]
    assert parse("<function=new></function>") == [Content("<function=new></function>")]
    assert parse(text)[1] == Arguments("{}")
