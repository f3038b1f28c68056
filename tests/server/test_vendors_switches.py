"""DeepSeek's `thinking`, OpenRouter's `usage` and the name `*` have the effect that they state."""

import json

import msgspec
import pytest

from aioserve.config import ModelConfig
from aioserve.errors import RequestError
from aioserve.server.chat.protocol import ChatCompletionRequest
from tests.server.serving import SIMULATED, running

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


def asked(**fields):
    return msgspec.convert({**ASK, **fields}, ChatCompletionRequest)


async def test_thinking_is_reasoning_effort_and_its_budget():
    assert asked().effort is None
    assert asked(thinking={"type": "disabled"}).effort == "none"
    assert asked(thinking={"type": "enabled"}).effort == "medium"
    assert asked(thinking={"type": "enabled"}, reasoning_effort="high").effort == "high"
    budget = asked(thinking={"type": "enabled", "budget_tokens": 9})
    assert budget.most_reasoning == (9, "thinking.budget_tokens")
    assert asked(thinking_token_budget=7).most_reasoning == (7, "thinking_token_budget")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "low"}, "thinking is disabled"),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": "none"}, "thinking is enabled"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 9}, "thinking_token_budget": 7},
            "budget_tokens differ",
        ),
    ],
)
async def test_thinking_that_contradicts_another_field_is_refused(fields, message):
    body = asked(**fields)
    with pytest.raises(RequestError, match=message):
        _ = body.effort, body.most_reasoning


async def test_usage_include_ends_a_stream_with_the_usage():
    async with running(SIMULATED) as server:
        for path, body in (
            (CHAT, ASK),
            ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
        ):
            for include in (True, False):
                given = {**body, "stream": True, "usage": {"include": include}}
                events = (await server.request("POST", path, json=given)).events()
                assert bool(events[-1].get("usage")) == include
                if include:
                    assert events[-1]["usage"]["completion_tokens"] == 4
        wrong = await server.request("POST", CHAT, json={**ASK, "usage": {"included": True}})
        assert wrong.json()["error"]["param"] == "usage.included"


async def test_a_server_of_every_name_serves_each_and_says_which_model_answers():
    model = ModelConfig(served_model_name=("mine", "*"))
    async with running(msgspec.structs.replace(SIMULATED, model=model)) as server:
        answer = await server.request("POST", CHAT, json={**ASK, "model": "claude-sonnet-4-5"})
        assert (answer.status, answer.json()["model"]) == (200, "mine")
        models = (await server.request("GET", "/v1/models")).json()["data"]
        assert [one["id"] for one in models] == ["mine"]
        ollama = {"model": "llama3:8b", "messages": ASK["messages"], "stream": False}
        told = await server.request("POST", "/api/chat", json=ollama)
        assert json.loads(told.body)["model"] == "mine"
    async with running(SIMULATED) as server:
        answer = await server.request("POST", CHAT, json={**ASK, "model": "claude-sonnet-4-5"})
        assert answer.status == 404
