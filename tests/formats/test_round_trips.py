"""Round trips find what is read otherwise than a chat template writes it."""

import pytest

from aioserve.features.formats import SHIPPED
from tests.formats.page import PAGE, Row, render
from tests.formats.round_trip import ALIKE, BUT_SPACE, OTHERWISE, RoundTrips

HERMES = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture
def trips_of():
    made = []

    def trips_of(source):
        made.append(RoundTrips(source))
        return made[-1]

    yield trips_of
    for trips in made:
        trips.close()


def outcomes(trips):
    return {trip.name: (trip.problem, trip.written, trip.note) for trip in trips.all()}


def test_what_a_format_reads_as_it_was_said_is_no_problem(trips_of):
    trips = trips_of(HERMES)
    assert set(outcomes(trips).values()) == {("", ALIKE, "")}
    assert len(outcomes(trips)) == 9
    row = Row.of("Mine", trips.choice, trips.all())
    assert row == ("Mine", "hermes", "qwen3", True, "", ALIKE, "")
    assert "| Mine | `hermes` | `qwen3` | yes | alike | |\n" in render([row], "1.0")


def test_what_is_read_otherwise_is_told_with_its_turn(trips_of):
    trips = trips_of(HERMES.replace("</tool_call>", "</tool_call>."))
    found = outcomes(trips)
    assert found["a call"][0] == "content '.'"
    assert found["content"][0] == ""
    row = Row.of("Mine", trips.choice, trips.all())
    assert (row.is_wrong, row.problem) == (True, "a call: content '.'")
    more = trips_of(HERMES.replace('{"name"', '{"id": 1, "name"'))
    assert outcomes(more)["parallel calls"] == ("", OTHERWISE, "")
    wrong = trips_of(HERMES.replace('"{{ call.function.name', '"my_{{ call.function.name'))
    assert outcomes(wrong)["a call"][0] == "calls of ['my_look_up']"


def test_what_a_template_leaves_out_or_refuses_is_a_note(trips_of):
    silent = trips_of(HERMES.replace("message.reasoning_content", "message.nothing"))
    assert outcomes(silent)["reasoning, a call"] == ("", ALIKE, "the template leaves out reasoning")
    refusing = trips_of("{{ raise_exception('No.') if messages[-1].tool_calls }}" + HERMES)
    problem, _, note = outcomes(refusing)["content, a call"]
    assert (problem, "No." in note) == ("", True)
    row = Row.of("Mine", refusing.choice, refusing.all())
    assert not row.writes_calls
    assert "| writes no calls; the template refuses it: " in render([row], "1.0")


def test_space_between_calls_is_told_from_other_differences(trips_of):
    found = outcomes(trips_of(HERMES.replace("<tool_call>\n", "<tool_call> ")))
    assert found["parallel calls"] == ("", BUT_SPACE, "")


def test_the_page_names_formats_that_ship():
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if " | `" in line]
    names = {row[1].strip("`") for row in rows} - {"-"}
    assert len(names) > 12
    assert names <= SHIPPED.keys()
