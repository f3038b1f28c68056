"""Text to content and calls, in whatever pieces it comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.features.formats import Arguments, Call, CallParser, Content, Event, Function
from aioserve.features.formats.call_block import DeepSeekV31Parser
from aioserve.features.formats.json_formats import (
    HermesParser,
    Llama3Parser,
    MistralParser,
    PlainJsonParser,
)
from tests.formats.pieces import read, read_alike

PARSERS = [HermesParser, Llama3Parser, MistralParser, DeepSeekV31Parser, PlainJsonParser]
FUNCTIONS = [Function(name, {"type": "object"}) for name in ("add", "get_weather")]


def deepseek(text: str) -> str:
    """With markers that can be typed."""
    for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"):
        text = text.replace(f"<{name}>", f"<\uff5ctool▁{name}\uff5c>")
    return text


def parse(parser: type[CallParser], pieces: list[str]) -> list[Event]:
    return read(parser(FUNCTIONS), pieces)


ADD = [Call("add"), Arguments('{"a": 1}')]
WEATHER = [Call("get_weather"), Arguments('{"city": "\\"}</tool_call>]"}')]

CASES: list[tuple[type[CallParser], str, list[Event]]] = [
    (
        HermesParser,
        'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"city": "\\"}</tool_call>]"}, "name": "get_weather"}</tool_call>'
        "\nDone. ",
        [Content("Let me see."), *ADD, *WEATHER, Content("Done. ")],
    ),
    # No call: everything comes back as it was.
    (HermesParser, "a <tool_call> b <tool", [Content("a <tool_call> b <tool")]),
    (HermesParser, ' <tool_call>\n{"a": 1}', [Content(' <tool_call>\n{"a": 1}')]),
    (HermesParser, "<tool_call>{'name': 'add'}", [Content("<tool_call>{'name': 'add'}")]),
    # No arguments, null, or JSON in a string.
    (
        HermesParser,
        '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "x", "arguments": null}'
        '</tool_call><tool_call>{"name":"add","arguments":"{\\"a\\": 1}"}</tool_call',
        [Call("add"), Arguments("{}"), Call("x"), Arguments("{}"), *ADD],
    ),
    # A brace is missing, or the reply was cut.
    (
        HermesParser,
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>and',
        [*ADD, Content("and")],
    ),
    (
        HermesParser,
        '<tool_call>{"name": "add", "arguments": {"a": "x',
        [Call("add"), Arguments('{"a": "x')],
    ),
    (
        Llama3Parser,
        ' {"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
        [*ADD, *ADD],
    ),
    (
        Llama3Parser,
        'Well: <|python_tag|>{"type": "function", "name": "new", "parameters": {}}\nSo.',
        [Content("Well:"), Call("new"), Arguments("{}"), Content("So.")],
    ),
    (Llama3Parser, "<|python_tag|>print(1)", [Content("<|python_tag|>print(1)")]),
    (Llama3Parser, '{"name": "Ann"} or ', [Content('{"name": "Ann"} or ')]),
    (
        MistralParser,
        'Hm [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abc"}, '
        '{"name": "get_weather", "arguments": {"city": "\\"}</tool_call>]"}}] ',
        [Content("Hm"), *ADD, *WEATHER],
    ),
    (
        MistralParser,
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]'
        '{"city": "\\"}</tool_call>]"}[TOOL_CALLS]add{"a": 1}',
        [*ADD, *WEATHER, *ADD],
    ),
    (
        MistralParser,
        '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}',
        [Call("add", "a1B2c3D4e"), Arguments('{"a": 1}')],
    ),
    (MistralParser, "[TOOL_CALLS] no [TOOL", [Content("[TOOL_CALLS] no [TOOL")]),
    (
        DeepSeekV31Parser,
        deepseek(
            "Hm.\n<calls▁begin><call▁begin>function<sep>add\n```json\n"
            '{"a": 1}\n```<call▁end>\n<call▁begin>get_weather<sep>'
            '{"city": "\\"}</tool_call>]"}<call▁end><calls▁end> So.'
        ),
        [Content("Hm."), *ADD, *WEATHER, Content("So.")],
    ),
    (
        DeepSeekV31Parser,
        deepseek("<call▁begin>function<sep>{}<call▁end>"),
        [Call("function"), Arguments("{}")],
    ),
    (
        DeepSeekV31Parser,
        deepseek("<calls▁begin><calls▁end><call▁begin>:"),
        [Content(deepseek("<call▁begin>:"))],
    ),
    (
        DeepSeekV31Parser,
        deepseek("<calls▁begin>what <call▁begin>that?"),
        [Content(deepseek("<calls▁begin>what <call▁begin>that?"))],
    ),
    (
        PlainJsonParser,
        '[{"name": "add", "arguments": {"a": 1}},\n'
        '{"name": "get_weather", "parameters": {"city": "\\"}</tool_call>]"}}]\n',
        [*ADD, *WEATHER],
    ),
    # JSON that was asked for.
    (PlainJsonParser, '[{"name": "Ann"}]', [Content('[{"name": "Ann"}]')]),
    (PlainJsonParser, "\n[1, 2] ", [Content("\n[1, 2] ")]),
    (PlainJsonParser, '{"city": {}}', [Content('{"city": {}}')]),
]


@pytest.mark.parametrize(("parser", "text", "events"), CASES, ids=range(len(CASES)))
def test_a_reply_is_read_alike_however_it_is_cut(parser, text, events):
    assert read_alike(lambda: parser(FUNCTIONS), text)[0] == events


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    *map(deepseek, ("<calls▁begin>", "<calls▁end>", "<call▁begin>", "<call▁end>", "<sep>")),
    "function", "```json\n", "\n```", "add", '{"name": "add", ', '"arguments": {"a": 1}}',
    '"parameters": "{}"}', "{", "}", "[", "]", '"', "\\", ",", ";", ":", " ", "\n",
    "x", "1", "null",
]  # fmt: skip


@given(st.sampled_from(PARSERS), st.lists(st.sampled_from(FRAGMENTS), max_size=12), st.data())
def test_any_text_is_read_alike_however_it_is_cut(parser, fragments, data):
    text = "".join(fragments)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(parser, pieces) == parse(parser, [text]) == parse(parser, list(text))


@given(st.sampled_from(PARSERS), st.text(alphabet="ab <[{\"':;\n", max_size=30))
def test_a_text_without_calls_comes_back_as_it_was(parser, text):
    assert parse(parser, list(text)) == ([Content(text)] if text else [])
