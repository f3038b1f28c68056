"""GLM's calls: keys and values between tags, with line breaks or without."""

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function, joined
from aioserve.features.formats.tagged_formats import Glm47Parser, GlmParser
from tests.formats.round_trip import ALIKE, RoundTrips

FUNCTIONS = [Function("add", {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}})]
ADD = [Call("add"), Arguments('{"a": 1, "b": " x\\n"}')]
LINES = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value> x\n</arg_value>\n</tool_call>"
)
DENSE = (
    "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
    "<arg_key>b</arg_key><arg_value> x\n</arg_value></tool_call>"
)


def parse(format_, pieces):
    reader = format_(FUNCTIONS)
    events = [event for piece in pieces for event in reader.append(piece)]
    return joined(events + reader.flush())


@pytest.mark.parametrize("format_", [GlmParser, Glm47Parser])
@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"Hm.\n{LINES}\n{DENSE}\nSo.", [Content("Hm."), *ADD, *ADD, Content("So.")]),
        ("<tool_call>now\n</tool_call>", [Call("now"), Arguments("{}")]),
        ("<tool_call>now</tool_call>", [Call("now"), Arguments("{}")]),
        ("<tool_call>\nnow\n\n</tool_", [Call("now"), Arguments("{}")]),
        (LINES[: LINES.index("1<") + 3], [Call("add"), Arguments('{"a": ')]),
        ("<tool_call>now", [Content("<tool_call>now")]),
        ("A <tool_call> tag\nand <arg_key>", [Content("A <tool_call> tag\nand <arg_key>")]),
        (
            "<tool_call>now\n<arg_key>a</arg_key>1</tool_call>",
            [Call("now"), Arguments("{}"), Content("<arg_key>a</arg_key>1</tool_call>")],
        ),
    ],
)
def test_both_names_read_both_forms(format_, text, events):
    assert parse(format_, [text]) == parse(format_, list(text)) == events


TEMPLATE = """\
{%- if tools %}<|system|>{{ tools | tojson }}<tool_call>{% endif %}
{%- for message in messages -%}
<|{{ message.role }}|>
{%- if message.role == 'assistant' %}{{ '\\n' -}}
<think>{{ message.reasoning_content or '' }}</think>{{ '\\n' -}}
{%- endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first else '' }}<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments.items() -%}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.parametrize("name", ["glm", "glm47"])
def test_what_its_template_writes_is_read_back_and_written_alike(name):
    source = TEMPLATE
    if name == "glm47":
        for mark in ("</arg_key>", "</arg_value>", ".function.name }}"):
            source = source.replace(f"{mark}\n", f"{mark}{'{##}' * ('}' in mark)}")
        source = source.replace("{{- '\\n' if message.content", "{{- '' if message.content")
    trips = RoundTrips(source)
    try:
        assert trips.choice.name == name
        assert {trip[1:4] for trip in trips.all()} == {("", ALIKE, "")}
    finally:
        trips.close()
