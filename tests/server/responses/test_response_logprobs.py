"""Logprobs of a response's messages: those of the tokens that the text is made of."""

import asyncio
import itertools
import json
import time
from pathlib import Path

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

import aioserve
from aioserve.apis.responses.answer import TokenQueue
from aioserve.config import EngineConfig, RunnerConfig
from aioserve.outputs import RequestOutput, TokenLogprobs
from tests.server.responses.test_responses import ASKED, SAY_AND_CALL, TOOLS
from tests.server.scripted import HERMES, saying
from tests.server.serving import running

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

TOKENIZER = Tokenizer.from_file(
    str(Path(aioserve.__file__).parent / "model_source/embedded/tokenizer.json")
)
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
        text = self._texts[token_id]
        raw = text.encode() if isinstance(text, str) else text
        return raw.decode(errors="replace"), list(raw)


def queue_of(*texts):
    """Tokens of these texts, or bytes."""
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


# A lead byte without its end, ends without a lead, and what is shown like either of them.
PIECES = [
    b"a",
    b"\xf0",
    b"\x9f\x98",
    b"\xe2\x82",
    "\xe9".encode(),
    "\ufffd".encode(),
    "\U0001f600".encode(),
]


@given(st.data())
async def test_every_token_is_told_once_with_its_text_however_broken_that_is(data):
    pieces = data.draw(st.lists(st.sampled_from(PIECES), min_size=1, max_size=12))
    shown = b"".join(pieces).decode(errors="replace")
    cuts = sorted(data.draw(st.sets(st.integers(1, len(shown)), max_size=4)) | {0, len(shown)})
    queue, told, ends = queue_of(*pieces), [], []
    for begin, end in itertools.pairwise(cuts):
        told += [bytes(entry.bytes) for entry in queue.take(shown[begin:end])]
        ends.append((shown[:end], b"".join(told)))
    assert told == pieces
    for text, raw in ends:  # what was told is there, but for a token that goes on behind it
        assert raw.decode(errors="replace").startswith(text.rstrip("\ufffd"))


async def test_marks_between_broken_texts_are_dropped():
    queue = queue_of("<a>", b"\xf0\x9f", b"\x98", "</a>", b"\xf0", "z", b"\x9f")
    assert [bytes(entry.bytes) for entry in queue.take("\ufffd")] == [b"\xf0\x9f", b"\x98"]
    assert [bytes(entry.bytes) for entry in queue.take("\ufffdz")] == [b"\xf0", b"z"]
    assert [bytes(entry.bytes) for entry in queue.take("\ufffd")] == [b"\x9f"]


def seconds_to_take(num_tokens, text_of):
    """Processor time in which a reply of broken bytes is told."""
    queue = queue_of(*[b"\xf0", b"\x9f\xf0"] * num_tokens)
    pieces = text_of(2 * num_tokens)
    began = time.process_time()
    for piece in pieces:
        queue.take(piece)
    return time.process_time() - began


@pytest.mark.parametrize(
    "text_of",
    [
        # it is not there, in every way
        pytest.param(lambda n: ["\ufffd" * n + "z"], marks=pytest.mark.slow),
        lambda n: ["\ufffd"] * n,
        pytest.param(lambda n: ["\ufffd" * (n - 1)] * 2, marks=pytest.mark.slow),
    ],
    ids=["none", "one by one", "at once"],
)
async def test_the_time_to_find_tokens_grows_with_the_reply_alone(text_of):
    few = min(seconds_to_take(500, text_of) for _ in range(3))
    # 8 times as many; the square would be 64 times
    assert any(seconds_to_take(4000, text_of) < 24 * few + 0.05 for _ in range(3))


async def test_a_reply_of_broken_bytes_with_logprobs_holds_no_other_request_up():
    """Each byte that is no character was a choice of a regex: 3 ** 60 ways of one request."""
    async with running(EngineConfig(runner=RunnerConfig(threads=1))) as server:
        first, second = map(TOKENIZER.token_to_id, ["\u00f0", "\u0141"])  # the bytes F0 and 9F
        body = {
            **{"input": "x", "max_output_tokens": 60, "temperature": 2, "seed": 1, **WANTED},
            **{"logit_bias": {first: 100, second: 97}, "stop": ["\ufffd" * 1500 + "z"]},
        }
        answer = await server.request("POST", "/v1/responses", json=body)
        (item,) = json.loads(answer.body)["output"]
    told = item["content"][0]
    assert "\ufffd" * 20 in told["text"]
    raw = b"".join(bytes(entry["bytes"]) for entry in told["logprobs"])
    assert raw.decode(errors="replace") == told["text"]
