"""Logprobs of a response's messages: those of the tokens that the text is made of."""

import asyncio
import json

import openai
import pytest

from aioserve.config import EngineConfig, RunnerConfig
from aioserve.outputs import RequestOutput, TokenLogprobs
from aioserve.server.responses.logprobs import TokenQueue
from tests.server.responses.test_responses import ASKED, SAY_AND_CALL, TOOLS
from tests.server.scripted import HERMES, saying
from tests.server.serving import running

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

WANTED = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


def words(entries):
    return b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")


def ask_with_openai(url):
    """Runs in a thread: the loop serves meanwhile."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**ASKED, **WANTED)
        with client.responses.create(**ASKED, **WANTED, stream=True) as stream:
            events = list(stream)
        alone = client.responses.create(**ASKED, include=WANTED["include"])
        return whole, events, alone


async def test_tokens_and_alternatives_come_whole_and_streamed():
    async with running(EngineConfig(runner=RunnerConfig(threads=1))) as server:
        whole, events, alone = await asyncio.to_thread(ask_with_openai, server.url)
    text = whole.output[0].content[0]
    assert words(text.logprobs) == text.text
    assert [len(entry.top_logprobs) for entry in text.logprobs] == [2] * len(text.logprobs)
    assert whole.top_logprobs == 2
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [words(delta.logprobs) for delta in deltas] == [delta.delta for delta in deltas]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert [entry.token for entry in done.logprobs] == [entry.token for entry in text.logprobs]
    kept = events[-1].response.output[0].content[0].logprobs
    assert [entry.logprob for entry in kept] == [entry.logprob for entry in text.logprobs]
    plain = alone.output[0].content[0].logprobs
    assert [entry.token for entry in plain] == [entry.token for entry in text.logprobs]
    assert not any(entry.top_logprobs for entry in plain)


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_reasoning_and_calls_are_in_no_message(tmp_path, stream):
    async with saying(SAY_AND_CALL, tmp_path, HERMES, reasoning_parser="qwen3") as server:
        body = {**ASKED, **WANTED, "max_output_tokens": 400, "tools": TOOLS, "stream": stream}
        answer = await server.request("POST", "/v1/responses", json=body)
    last = answer.body.splitlines()[-2 if stream else -1].removeprefix(b"data: ")
    reply = json.loads(last)["response"] if stream else json.loads(last)
    told = [item["content"][0] for item in reply["output"] if item["type"] == "message"]
    assert [part["text"] for part in told] == ["Well.", "And so."]
    said = ["".join(entry["token"] for entry in part["logprobs"]) for part in told]
    for text, part in zip(said, told, strict=True):
        # A token may begin in the mark before the text.
        assert text.endswith(part["text"])
        assert "Hm" not in text
        assert "add" not in text


class Texts:
    """Tokens of these texts, by their places."""

    def __init__(self, *texts):
        self._texts = texts

    def __getitem__(self, token_id):
        return self._texts[token_id], list(self._texts[token_id].encode())


def queue_of(*texts):
    queue = TokenQueue(Texts(*texts))
    entries = [TokenLogprobs(-0.5, 1, [], []) for _ in texts]
    queue.append(RequestOutput(request_id="r", token_ids=[*range(len(texts))], logprobs=entries))
    return queue


def names(entries):
    return [entry.token for entry in entries]


async def test_a_token_in_two_pieces_is_told_once_with_the_first():
    queue = queue_of("a", "bcd", "e")
    assert names(queue.take("ab")) == ["a", "bcd"]
    assert names(queue.take("c")) == []
    assert names(queue.take("de")) == ["e"]


async def test_tokens_between_two_pieces_are_marks():
    queue = queue_of("<think>", "so", "</think>", "yes", "!")
    assert names(queue.take("so")) == ["so"]
    assert names(queue.take("yes!")) == ["yes", "!"]


async def test_a_text_that_the_model_did_not_write_has_all_tokens_that_are_pending():
    queue = queue_of("a", "b")
    assert names(queue.take("A B")) == ["a", "b"]
    assert names(queue.take("c")) == []
