"""Qwen2.5-Coder-0.5B-Instruct calls tools in three turns, over each wire format."""

from collections.abc import Iterator
from urllib.request import urlopen

import jsonschema
import pytest

from tests.processes import serving, until
from tests.real_models.dialogues import DIALOGUES, TOOLS, Call, Choice, Reply
from tests.real_models.weights import fetched

pytestmark = pytest.mark.real_models

#: What the user asks, the tool for it, what it is called with, and what it returns.
TURNS = (
    ("What is the weather in Paris?", "get_weather", {"city": "Paris"}, "22 degrees, sunny"),
    ("What is 17 plus 25?", "add", {"a": 17, "b": 25}, "42"),
    ("And what is the weather in Oslo?", "get_weather", {"city": "Oslo"}, "3 degrees, snow"),
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    flags = ("--served-model-name", "qwen", "--max-model-len", "4096", "--num-kv-blocks", "600")
    with serving("--model", str(fetched("qwen")), *flags, is_shared=True) as (_, url):
        until(lambda: _is_ready(url), "the model is loaded")
        yield url


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/ready", timeout=60) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def loop(url: str, wire: str, choice: Choice, *, is_streamed: bool) -> list[list[Reply]]:
    """For each of three questions the reply, and if it has a call, the answer to its result."""
    dialogue = DIALOGUES[wire](url, "qwen")
    turns = []
    for question, tool, _, result in TURNS:
        dialogue.tell(question)
        replies = [dialogue.ask(choice, tool, is_streamed=is_streamed)]
        for call in replies[0].calls:
            dialogue.give(call, result)
        if replies[0].calls:
            replies.append(dialogue.ask("none", tool, is_streamed=is_streamed))
        turns.append(replies)
    return turns


@pytest.mark.parametrize("choice", ["required", "named", "auto"])
@pytest.mark.parametrize("wire", DIALOGUES)
def test_three_turns_call_tools_and_a_stream_says_what_a_whole_reply_does(
    url: str, wire: str, choice: Choice
) -> None:
    """By itself the model calls in the first two; in the third it makes a result up."""
    whole = loop(url, wire, choice, is_streamed=False)
    num_calls = sum(len(replies) == 2 for replies in whole)
    assert num_calls >= (2 if choice == "auto" else 3)
    for replies, (_, tool, arguments, _) in zip(whole, TURNS, strict=True):
        if len(replies) == 1:
            assert replies[0].text
            continue
        called, answer = replies
        call: Call = called.calls[0]
        jsonschema.validate(call.arguments, TOOLS[call.name])
        assert (call.name, call.arguments) == (tool, arguments)
        assert called.reason == DIALOGUES[wire].reason
        assert answer.text
        assert not answer.calls
    streamed = loop(url, wire, choice, is_streamed=True)
    assert [[reply.without_ids() for reply in replies] for replies in streamed] == [
        [reply.without_ids() for reply in replies] for replies in whole
    ]
