"""Reasoning and the rest of a reply, in whatever pieces it comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.features.formats import (
    MARKS,
    Call,
    Content,
    Function,
    Reasoning,
    ReasoningParser,
    ReplyParser,
    choose_reasoning,
)
from aioserve.features.formats.json_formats import HermesParser
from tests.formats.pieces import read


def parse(name, pieces, prompt_end="", calls=None):
    return read(ReplyParser(ReasoningParser(MARKS[name], prompt_end), calls), pieces)


BOTH = [Reasoning("I see. </th"), Content("Hi <think>")]


@pytest.mark.parametrize(
    ("name", "prompt_end", "text", "events"),
    [
        ("qwen3", "", "\n<think>\nI see. </th\n</think>\n\nHi <think>", BOTH),
        ("qwen3", "<|assistant|><think>\n", "\nI see. </th\n</think>\n\nHi <think>", BOTH),
        ("qwen3", "<think>\n\n</think>\n\n", " Hi </think>", [Content(" Hi </think>")]),
        ("qwen3", "<think>", "Hm <th", [Reasoning("Hm <th")]),
        ("qwen3", "", "<th", [Content("<th")]),
        ("qwen3", "say <think> twice<|assistant|>\n", "Hi", [Content("Hi")]),
        ("qwen3", "", "<think></think>", []),
        ("deepseek_r1", "", "I see. </th</think>Hi <think>", BOTH),
        ("deepseek_r1", "</think>\n", "Hi", [Content("Hi")]),
        ("mistral", "", "[THINK]I see. </th[/THINK]Hi <think>", BOTH),
    ],
)
def test_reasoning_is_told_from_content_however_the_reply_is_cut(name, prompt_end, text, events):
    for pieces in ([text], list(text)):
        assert parse(name, pieces, prompt_end) == events


@given(
    st.sampled_from(["qwen3", "deepseek_r1"]),
    st.sampled_from(["", "<think>"]),
    st.lists(st.sampled_from(["<think>", "</think>", "</th", "<", " ", "\n", "a"]), max_size=9),
    st.integers(0, 40),
)
def test_any_cut_of_any_reply_gives_the_same(name, prompt_end, fragments, cut):
    text = "".join(fragments)
    whole = parse(name, [text], prompt_end)
    assert parse(name, [text[:cut], text[cut:]], prompt_end) == whole
    assert parse(name, list(text), prompt_end) == whole


def test_a_call_that_is_only_thought_of_is_none():
    text = '<think><tool_call>{"name": "a"}</tool_call></think><tool_call>{"name": "b"}</tool_call>'
    events = parse("qwen3", list(text), calls=HermesParser([Function(name, {}) for name in "ab"]))
    assert [event.name for event in events if isinstance(event, Call)] == ["b"]


def test_what_is_thought_follows_from_the_template():
    assert choose_reasoning("{{ '<think>\n' }}{{ x.split('</think>') }}") == "qwen3"
    assert choose_reasoning("{{ x.split('</think>')[-1] }}") == "deepseek_r1"
    assert choose_reasoning("{{ '[THINK]' }}") == "mistral"
    assert choose_reasoning("{{ messages }}") is None
