"""Kimi K2's calls: ids that the model writes and that go back."""

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function, joined
from aioserve.features.formats.call_block import KimiK2Parser
from tests.formats.round_trip import ALIKE, RoundTrips


def kimi(text):
    """With marks that can be typed."""
    for short, name in {
        "{{": "tool_calls_section_begin",
        "}}": "tool_calls_section_end",
        "[[": "tool_call_begin",
        "::": "tool_call_argument_begin",
        "]]": "tool_call_end",
    }.items():
        text = text.replace(short, f"<|{name}|>")
    return text


def parse(pieces):
    reader = KimiK2Parser([Function("add", {})])
    events = [event for piece in pieces for event in reader.append(piece)]
    return joined(events + reader.flush())


ADD = [Call("add", "functions.add:3"), Arguments('{"a": 1}')]
NEW = [Call("a.b", "functions.a.b:4"), Arguments("{}")]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (
            'Hm.{{[[functions.add:3::{"a": 1}]][[functions.a.b:4::]]}} So.',
            [Content("Hm."), *ADD, *NEW, Content("So.")],
        ),
        ('{{ [[ functions.add:3 :: {"a": 1} ]]\n}}', ADD),
        ('[[functions.add:3::{"a": 1}', ADD),
        ("{{[[add::{}]]", [Call("add"), Arguments("{}")]),
        ("{{[[add:5::{}]]", [Call("add", "add:5"), Arguments("{}")]),
        ("{{[[functions.add:3::{}", [Call("add", "functions.add:3"), Arguments("{}")]),
        ("{{[[:::{}", [Content(kimi("{{[[:::{}"))]),
        ("{{[[functions.add:3]]", [Content(kimi("{{[[functions.add:3]]"))]),
        ("{{[[functions.add:", [Content(kimi("{{[[functions.add:"))]),
        ("{{none}}", [Content(kimi("{{none}}"))]),
    ],
)
def test_the_id_of_a_call_is_that_of_the_model(text, events):
    text = kimi(text)
    assert parse([text]) == parse(list(text)) == events


TEMPLATE = """\
{%- if tools %}<|im_system|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages -%}
<|im_{{ message.role }}|>
{%- if message.role == 'assistant' %}<think>{{ message.reasoning_content or '' }}</think>{% endif %}
{%- if message.role == 'tool' %}## Return of {{ message.tool_call_id + '\\n' }}{% endif %}
{{- message.content or '' }}
{%- if message.tool_calls %}<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>functions.{{ call.function.name }}:{{ loop.index0 }}
{{- '<|tool_call_argument_begin|>' }}{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>
{%- endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>{% endif %}"""


def test_what_its_template_writes_is_read_back_and_written_alike():
    trips = RoundTrips(TEMPLATE)
    try:
        assert trips.choice.name == "kimi_k2"
        assert {trip[1:4] for trip in trips.all()} == {("", ALIKE, "")}
    finally:
        trips.close()
