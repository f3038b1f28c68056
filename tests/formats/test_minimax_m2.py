"""MiniMax M2's calls: all of a reply between one pair of marks."""

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function, joined
from aioserve.features.formats.tagged_formats import MiniMaxM2Parser
from tests.formats.round_trip import ALIKE, RoundTrips

FUNCTIONS = [Function("add", {"properties": {"a": {"type": "number"}, "b": {"type": "string"}}})]
ONE = '<invoke name="add">\n<parameter name="a">1.5</parameter>\n</invoke>\n'
TWO = '<invoke name="add">\n<parameter name="b">"x"\n</parameter>\n</invoke>\n'
ADD = [Call("add"), Arguments('{"a": 1.5}')]
ADD_TEXT = [Call("add"), Arguments('{"b": "\\"x\\"\\n"}')]
OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"


def parse(pieces):
    reader = MiniMaxM2Parser(FUNCTIONS)
    events = [event for piece in pieces for event in reader.append(piece)]
    return joined(events + reader.flush())


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


TEMPLATE = """\
{%- if tools %}]~b]system{{ tools | tojson }}<minimax:tool_call>[e~[{% endif %}
{%- for message in messages -%}
]~b]{{ message.role }}{{ '\\n' -}}
{%- if message.reasoning_content -%}
<think>{{ '\\n' + message.reasoning_content + '\\n' }}</think>{{ '\\n\\n' }}
{%- endif %}{{ message.content or '' }}
{%- if message.tool_calls %}{{ '\\n' if message.content else '' }}<minimax:tool_call>
{% for call in message.tool_calls %}<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments.items() %}<parameter name="{{ key }}">
{{- value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>
{%- endif %}[e~[
{% endfor %}
{%- if add_generation_prompt %}]~b]assistant
{% endif %}"""


def test_what_its_template_writes_is_read_back_and_written_alike():
    trips = RoundTrips(TEMPLATE)
    try:
        assert trips.choice.name == "minimax_m2"
        assert {trip[1:4] for trip in trips.all()} == {("", ALIKE, "")}
    finally:
        trips.close()
