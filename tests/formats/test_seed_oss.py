"""Seed-OSS's calls and reasoning, with values as Python prints them."""

import json

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function, joined
from aioserve.features.formats.tagged_formats import SeedOssParser
from tests.formats.round_trip import ALIKE, RoundTrips

SCHEMA = {"properties": {"a": {"type": "object"}, "b": {"type": "string"}, "c": {"type": "array"}}}


def parse(pieces):
    reader = SeedOssParser([Function("add", SCHEMA)])
    events = [event for piece in pieces for event in reader.append(piece)]
    return joined(events + reader.flush())


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


TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}<seed:tool_call>{% endif %}
{%- for message in messages -%}
<seed:bos>{{ message.role + '\\n' }}
{%- if message.reasoning_content -%}
<seed:think>{{ message.reasoning_content }}</seed:think>{{ '\\n' }}
{%- endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- ('\\n\\n' if message.content else '') if loop.first else '\\n' }}<seed:tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>{{ value }}</parameter>
{% endfor %}</function>
</seed:tool_call>
{%- endfor %}<seed:eos>
{%- endfor %}
{%- if add_generation_prompt %}<seed:bos>assistant
{% endif %}"""


def test_what_its_template_writes_is_read_back_and_written_alike():
    trips = RoundTrips(TEMPLATE)
    try:
        assert (trips.choice.name, trips.choice.marks.start) == ("seed_oss", "<seed:think>")
        assert {trip[1:4] for trip in trips.all()} == {("", ALIKE, "")}
    finally:
        trips.close()
