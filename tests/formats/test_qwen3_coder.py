"""Qwen3-Coder's calls: values typed by the schema, long texts streamed, tags forgotten."""

import json

import pytest

from aioserve.features.formats import Arguments, Call, Content, Function, Reply, SaidCall
from aioserve.features.formats.tagged import Qwen3CoderParser
from tests.formats.pieces import read

SCHEMA = {
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "is_it": {"type": "boolean"},
        "where": {"type": "object"},
        "tags": {"type": "array"},
        "maybe": {"type": ["string", "null"]},
    }
}
FUNCTIONS = [Function("write", SCHEMA), Function("now", {"type": "object", "properties": {}})]


def parse(pieces, functions=FUNCTIONS):
    reader = Qwen3CoderParser(functions)
    return read(reader, pieces), reader.num_malformed


def call(**said):
    values = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in said.items())
    return f"<tool_call>\n<function=write>\n{values}</function>\n</tool_call>"


def arguments_of(text):
    events, num_malformed = parse(list(text))
    assert parse([text]) == (events, num_malformed)
    [said] = [event.text for event in events if isinstance(event, Arguments)]
    return json.loads(said)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", "", ""),
        ("text", "\n a\n\n", "\n a\n\n"),
        ("text", 'for x in "</param": <function=f> <tool_call>\n', None),
        ("text", "ünï 😀 \\n \x07", None),
        ("n", "5", 5),
        ("n", "five", "five"),
        ("is_it", "True", True),
        ("is_it", "false", False),
        ("where", '{"a": {"b": [1, null]}, "c": "</parameter>\\n</function>"}', ...),
        ("where", "{'a': True, 'b': (1, None)}", {"a": True, "b": [1, None]}),
        ("where", '{"a": "no end', None),
        ("tags", '["ä", 1]', ...),
        ("tags", "[broken", None),
        ("maybe", "None", None.__class__()),
        ("maybe", "nothing", "nothing"),
        ("maybe", "5", "5"),
        ("unknown", "[1]", [1]),
        ("unknown", "a text", "a text"),
    ],
)
def test_a_value_has_the_type_of_its_schema(key, text, value):
    expected = json.loads(text) if value is ... else value
    if value is None and (key, text) != ("maybe", "None"):
        expected = text
    assert arguments_of(call(**{key: text})) == {key: expected}


def test_a_text_is_streamed_as_it_comes():
    reader = Qwen3CoderParser(FUNCTIONS)
    begun, _, ended = call(path="a.py", text="@").partition("@")
    reader.append(begun)
    for i in range(1000):
        assert reader.append(f"line {i}\n")  # but for its last line break
    said = [event for event in reader.append(ended) if isinstance(event, Arguments)]
    assert "".join(event.text for event in said) == '\\n"}'


def test_text_stands_around_calls_and_calls_beside_each_other():
    one, two = call(n="1"), call(n="2")
    text = f"I see.\n\n{one}\n{two} \n\nDone. "
    ones, twos = ([Call("write"), Arguments(f'{{"n": {i}}}')] for i in (1, 2))
    expected = [Content("I see."), *ones, *twos, Content("Done. ")]
    assert parse([text]) == parse(list(text)) == (expected, 0)
    within = one.replace("\n</tool_call>", "") + two.replace("<tool_call>", "")
    assert parse(list(within))[0] == [*ones, *twos]


@pytest.mark.parametrize(
    "text",
    [
        call(n="1").replace("<tool_call>\n", ""),
        call(n="1").replace("<tool_call>\n", "").replace("\n</tool_call>", ""),
        call(n="1").replace("\n</tool_call>", ""),
        call(n="1").replace("</function>\n", ""),
        call(n="1").replace("\n", ""),
        "<tool_call>\n\n<function=write>\n\n<parameter=n>\n1</parameter></function></tool_call>\n",
    ],
)
def test_tags_and_line_breaks_that_a_model_forgets_are_not_missed(text):
    assert parse(list(text)) == parse([text]) == ([Call("write"), Arguments('{"n": 1}')], 0)


@pytest.mark.parametrize(
    ("text", "num_malformed"),
    [
        ("Say <tool_call> to call.", 1),
        ("<tool_call></tool_call>", 1),
        ('<tool_call>\n{"name": "write"}\n</tool_call>', 1),
        ("In XML: <function=unknown>\n</function>", 1),
        ("<function=wri", 1),
        ("<tool_call", 0),
    ],
)
def test_what_is_no_call_is_content(text, num_malformed):
    assert parse(list(text)) == parse([text]) == ([Content(text)], num_malformed)


def test_a_call_that_is_cut_or_broken_is_told_as_far_as_it_goes():
    whole = call(path="a.py", n="12", text="x")
    cut = whole[: whole.index("12")]
    assert parse(list(cut))[0] == [Call("write"), Arguments('{"path": "a.py", "n": ')]
    cut = whole[: whole.rindex("</para") + 6]
    assert parse(list(cut))[0][-1] == Arguments('{"path": "a.py", "n": 12, "text": "x')
    broken = whole.replace("<parameter=text>", "text:")
    events, _ = parse(list(broken))
    assert events[1:] == [
        Arguments('{"path": "a.py", "n": 12}'),
        Content("text:\nx\n</parameter>\n</function>\n</tool_call>"),
    ]


def test_what_cannot_be_said_is_refused():
    for said in ({"text": "a</parameter>b"}, {"a>b": 1}, {"": 1}):
        with pytest.raises(ValueError, match=r"in it|cannot stand"):
            Qwen3CoderParser.write(Reply(calls=[SaidCall("write", said)]))
    with pytest.raises(ValueError, match="beginning of a call"):
        Qwen3CoderParser.write(Reply("<tool_call>"))
