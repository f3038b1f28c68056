"""Tools, reasoning and typed replies from Python: the same by the engine and by the client."""

import dataclasses
import runpy
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
import pytest
from aiohttp import web

from aioserve import AsyncClient, AsyncEngine, EngineConfig, SamplingParams
from aioserve.engine.language_model import ToolCall, UnparsedReplyError, tool_of
from aioserve.errors import (
    ConfigError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)
from aioserve.outputs import FinishReason
from aioserve.server.sockets import bind
from tests.test_whole import asked_by

EXAMPLE = Path(__file__).parents[1] / "examples" / "tool_loop.py"
MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]
GREEDY = SamplingParams(max_tokens=100, temperature=0)


def weather(city: Literal["Rome", "Oslo"], days: Literal[1, 2] = 1) -> str:
    """Return the weather
    in a city.

    This paragraph is for people.
    """
    return f"rain in {city} for {days} days"


class Place(msgspec.Struct):
    city: Literal["Rome", "Oslo"]
    is_warm: bool


@dataclasses.dataclass
class Choice:
    is_warm: bool


class Model:
    """A type as pydantic's models are, which is not installed everywhere."""

    def __init__(self, is_warm: bool) -> None:
        self.is_warm = is_warm

    @staticmethod
    def model_json_schema() -> dict[str, object]:
        return {
            "type": "object",
            "properties": {"is_warm": {"type": "boolean"}},
            "required": ["is_warm"],
        }

    @classmethod
    def model_validate_json(cls, text: str) -> "Model":
        return cls(**msgspec.json.decode(text))


@pytest.fixture(params=["engine", "client"])
async def pair(request):
    async with asked_by(request.param, EngineConfig(server={"tool_call_parser": "hermes"})) as pair:
        yield pair


def test_a_function_is_told_by_its_name_its_types_and_its_first_paragraph():
    assert tool_of(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Return the weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Oslo", "Rome"]},
                    "days": {"enum": [1, 2], "default": 1},
                },
                "required": ["city"],
            },
        },
    }
    with pytest.raises(RequestError, match="parameter args cannot be named"):
        tool_of(print)
    with pytest.raises(RequestError, match="a tool must be a mapping or a function, got 5"):
        tool_of(5)


async def test_a_forced_call_is_told_whole_and_its_answer_goes_on(pair):
    engine, asked = pair
    named = {"type": "function", "function": {"name": "weather"}}
    reply = await asked.chat_one(MESSAGES, GREEDY, tools=[weather], tool_choice=named)
    assert reply.finish_reason is FinishReason.TOOL_CALLS
    assert (reply.text, reply.reasoning) == ("", "")
    [call] = reply.tool_calls
    assert call.name == "weather"
    assert call.id
    said = weather(**call.arguments)  # the schema of the function holds
    messages = [*MESSAGES, reply.message, call.answer(said)]
    whole = await asked.chat_one(messages, GREEDY, tools=[weather], tool_choice="none")
    # The template sees the same messages, whichever way they came.
    expected = await engine.chat_one(messages, GREEDY, tools=[weather], tool_choice="none")
    assert (whole.text, whole.num_prompt_tokens) == (expected.text, expected.num_prompt_tokens)
    streamed = [
        output async for output in asked.chat(MESSAGES, GREEDY, tools=[weather], tool_choice=named)
    ]
    calls = [(each.name, each.arguments) for output in streamed for each in output.tool_calls]
    assert calls == [(call.name, call.arguments)]
    assert streamed[-1].finish_reason is FinishReason.TOOL_CALLS


async def test_a_call_that_is_cut_is_text(pair):
    _, asked = pair
    few = SamplingParams(max_tokens=25, temperature=0)
    reply = await asked.chat_one(MESSAGES, few, tools=[weather], tool_choice="required")
    assert reply.finish_reason is FinishReason.LENGTH
    assert reply.tool_calls == []


async def test_a_reply_is_a_value_of_the_type_that_was_asked_for(pair):
    _, asked = pair
    for kind in (Place, Choice, Model):
        reply = await asked.chat_one(MESSAGES, GREEDY, response_type=kind)
        assert isinstance(reply.parsed, kind)
        assert isinstance(reply.parsed.is_warm, bool)
    *before, last = [output async for output in asked.chat(MESSAGES, GREEDY, response_type=Place)]
    assert before
    for output in before:
        with pytest.raises(UnparsedReplyError, match="has not ended"):
            _ = output.parsed
    assert last.parsed == (await asked.chat_one(MESSAGES, GREEDY, response_type=Place)).parsed
    assert (await asked.chat_one(MESSAGES, GREEDY)).parsed is None


async def test_a_reply_that_was_cut_is_no_value(pair):
    _, asked = pair
    few = SamplingParams(max_tokens=2, temperature=0)
    reply = await asked.chat_one(MESSAGES, few, response_type=Place)
    with pytest.raises(UnparsedReplyError, match=r"has ended early \(length\)"):
        _ = reply.parsed


async def test_samples_are_read_apart(pair):
    _, asked = pair
    params = SamplingParams(n=3, seed=1, max_tokens=100)
    found = {}
    async for output in asked.chat(MESSAGES, params, tools=[weather], tool_choice="required"):
        found.setdefault(output.index, []).extend(output.tool_calls)
    assert sorted(found) == [0, 1, 2]
    assert all(call.name == "weather" for calls in found.values() for call in calls)


async def test_what_cannot_be_meant_is_refused_by_its_argument(pair):
    _, asked = pair
    for options, param in [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [weather, weather]}, "tools[1]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [weather], "tool_choice": "perhaps"}, "tool_choice"),
        ({"response_type": object}, "response_type"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ]:
        with pytest.raises(RequestError) as caught:
            await asked.chat_one(MESSAGES, GREEDY, **options)
        assert (caught.value.param or "").startswith(param), options
    for messages in (None, "Hello", ["Hello"], [{"role": "assistant", "tool_calls": [{}]}]):
        with pytest.raises(RequestError):
            await asked.chat_one(messages, GREEDY)
    with pytest.raises(TypeError, match="tool"):
        await asked.chat_one(MESSAGES, GREEDY, tool=[weather])


async def test_reasoning_is_told_apart():
    config = EngineConfig(server={"reasoning_parser": "deepseek_r1"})
    for way in ("engine", "client"):
        async with asked_by(way, config) as (_, asked):
            short = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            reply = await asked.chat_one(MESSAGES, short)
            assert reply.reasoning  # it has begun, and is not ended by a mark
            assert reply.text == ""
            assert reply.message["reasoning_content"] == reply.reasoning
            deltas = [output.reasoning async for output in asked.chat(MESSAGES, short)]
            assert "".join(deltas) == reply.reasoning


async def test_tools_of_a_model_that_writes_no_calls_are_refused():
    async with AsyncEngine() as engine:
        with pytest.raises(RequestError, match="no known format of tool calls"):
            await engine.chat_one(MESSAGES, tools=[weather])


async def test_a_format_that_is_none_is_a_config_error():
    config = EngineConfig(server={"tool_call_parser": "nonsense"})
    async with AsyncEngine(config) as engine:
        with pytest.raises(ConfigError, match="nonsense"):
            await engine.chat_one(MESSAGES)


def test_the_tool_loop_of_the_examples_runs(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.startswith("Advice(umbrella=")


def test_an_answer_is_a_message_of_the_tool():
    call = ToolCall("1", "weather", {"city": "Rome"})
    assert call.answer({"rain": True})["content"] == '{"rain":true}'
    assert call.answer("rain") == {
        "role": "tool", "tool_call_id": "1", "name": "weather", "content": "rain",
    }  # fmt: skip


# A server that refuses for now.


@asynccontextmanager
async def refusing(num_refusals, status, code):
    """A server that refuses so often, and then tells of no models."""
    asked = []

    async def models(request: web.Request) -> web.Response:
        asked.append(request.path)
        if len(asked) <= num_refusals:
            error = {"message": "not now", "type": "server_error", "code": code}
            headers = {"Retry-After": "0.01"}
            return web.json_response({"error": error}, status=status, headers=headers)
        return web.json_response({"data": []})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    [sock] = bind("127.0.0.1", 0)
    await web.SockSite(runner, sock).start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", asked
    finally:
        await runner.cleanup()
        sock.close()


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (503, "engine_unavailable", EngineUnavailableError),
        (503, "engine_paused", EngineOverloadedError),
        (429, "engine_overloaded", EngineOverloadedError),
        (503, None, EngineUnavailableError),
    ],
)
async def test_a_request_that_is_refused_for_now_is_sent_again(status, code, error):
    async with refusing(2, status, code) as (url, asked):
        async with AsyncClient(url) as client:
            with pytest.raises(error) as caught:
                await client.models()
            assert caught.value.retry_after == 0.01
        async with AsyncClient(url, retries=1) as client:
            assert await client.models() == []
        assert len(asked) == 3


async def test_a_request_is_sent_again_so_often_and_no_more():
    async with refusing(9, 503, "engine_unavailable") as (url, asked):
        async with AsyncClient(url, retries=3) as client:
            with pytest.raises(EngineUnavailableError):
                await client.models()
        assert len(asked) == 4


async def test_a_server_that_is_not_there_is_unavailable():
    [sock] = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    sock.close()
    async with AsyncClient(url, retries=1) as client:
        with pytest.raises(EngineUnavailableError, match="no answer from") as caught:
            await client.models()
        assert caught.value.retry_after > 0
