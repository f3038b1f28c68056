"""A format of one's own, by its file: whole replies, ids, and what is written wrong, over HTTP."""

import asyncio
import json
from pathlib import Path

import pytest

from aioserve.config import EngineConfig, ServerConfig
from aioserve.errors import ConfigError
from aioserve.server.app import serve
from tests.server.scripted import HERMES, saying

CHANNELS = f"{Path(__file__).parents[2] / 'formats' / 'channels.py'}:ChannelFormat"
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"enum": [1, 2]}}}},
}
THOUGHT = "<|channel|>thought<|text|>Hm.<|done|>"
CALL = '<|channel|>call add<|text|>{"a": 1}<|done|>'


@pytest.fixture
def say(tmp_path):
    def say(text, **settings):
        return saying(text, tmp_path, HERMES, "<|pad|>", "m", **settings)

    return say


def counts(text):
    return {
        line.partition("part=")[2][1:5]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("aioserve_malformed_tool_calls_total")
    }


async def scraped(server):
    answer = await server.session.get(server.url + "/metrics")
    return counts(await answer.text())


async def test_a_format_of_whole_replies_tells_reasoning_content_and_calls_apart(say):
    text = f"{THOUGHT}<|channel|>answer<|text|>Let me see.<|done|>{CALL}"
    async with say(text, tool_call_parser=CHANNELS) as server:
        for stream in (False, True):
            answer = await server.chat(tools=[ADD], stream=stream)
            assert answer.status == 200, answer
            if stream:
                deltas = [event["choices"][0]["delta"] for event in answer.events()]
                content = "".join(delta.get("content") or "" for delta in deltas)
                thought = "".join(delta.get("reasoning_content") or "" for delta in deltas)
                calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
                said = "".join(call["function"].get("arguments", "") for call in calls)
            else:
                message = answer.json()["choices"][0]["message"]
                content, thought = message["content"], message["reasoning_content"]
                said = message["tool_calls"][0]["function"]["arguments"]
            assert (content, thought, json.loads(said)) == ("Let me see.", "Hm.", {"a": 1})
        # Without tools it reads the rest all the same.
        message = (await server.chat()).json()["choices"][0]["message"]
        assert message["content"].startswith("Let me see.")
        assert message["reasoning_content"] == "Hm."
        assert "tool_calls" not in message


RAISES = """
from aioserve.features.formats.json_formats import HermesParser

class Raises(HermesParser):
    said = ""
    def append(self, text):
        events = super().append(text)
        before, self.said = self.said, self.said + "".join(event.text for event in events)
        if "kept" in self.said and "kept" not in before:  # once
            raise KeyError("kept")
        return events
"""


async def test_a_format_that_raises_fails_its_own_request_and_no_other(say, tmp_path):
    (tmp_path / "raises.py").write_text(RAISES)
    parser = f"{tmp_path}/raises.py:Raises"
    # Requests fail while a step is under way.
    async with say("I have kept it.", tool_call_parser=parser, step_ms=1) as server:
        asked = [
            server.chat(tools=[ADD], stream=stream) if has_tools else server.chat(stream=stream)
            for stream in (False, True)
            for has_tools in (True, False)
        ]
        failed, whole, broken, streamed = await asyncio.gather(*asked)
        assert failed.status == 500
        assert whole.json()["choices"][0]["message"]["content"] == "I have kept it."
        assert b"internal_error" in broken.body.splitlines()[-2]
        assert b'"finish_reason":"' not in broken.body
        deltas = [event["choices"][0]["delta"] for event in streamed.events()]
        assert "".join(delta.get("content") or "" for delta in deltas) == "I have kept it."
        assert set((await server.gauges()).values()) == {0}


async def test_calls_that_are_written_wrong_are_counted_by_their_format(say):
    async with say("<tool_call>add it</tool_call>", tool_call_parser="hermes") as server:
        assert await scraped(server) == {"call": 0, "argu": 0}
        message = (await server.chat(tools=[ADD])).json()["choices"][0]["message"]
        assert message["content"] == "<tool_call>add it</tool_call>"
        assert await scraped(server) == {"call": 1, "argu": 0}
        server.say('<tool_call>{"name": "add", "arguments": {"a": oh}}</tool_call>')
        message = (await server.chat(tools=[ADD])).json()["choices"][0]["message"]
        assert message["content"] == '{"name": "add", "arguments": {"a": oh}'
        assert await scraped(server) == {"call": 1, "argu": 1}
        # One that is cut is not wrong.
        await server.chat(tools=[ADD], max_tokens=12)
        await server.chat(tools=[ADD], max_tokens=3)
        assert await scraped(server) == {"call": 1, "argu": 1}


async def test_an_unknown_format_is_refused_before_a_port_is_taken():
    config = EngineConfig(server=ServerConfig(tool_call_parser="hermse"))
    with pytest.raises(ConfigError, match=r"unknown format 'hermse' \(did you mean 'hermes'"):
        await serve(config)
