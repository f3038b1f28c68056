"""The time that a body takes on the event loop grows with the body alone, whatever it holds."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.serving import SIMULATED, Server, running

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

FEW, MANY = 1_000, 8_000

USER = {"role": "user", "content": "x"}
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def tool(name: str, num_properties: int = 1) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(num_properties)}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def openai_calls(n: int) -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for i in range(n // 4)
    ]
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "y"} for call in calls]
    return [USER, {"role": "assistant", "tool_calls": calls}, *answers]


def anthropic_calls(n: int) -> list[dict[str, Any]]:
    ids = [f"c{i}" for i in range(n // 4)]
    calls = [{"type": "tool_use", "id": each, "name": "f", "input": {}} for each in ids]
    answers = [{"type": "tool_result", "tool_use_id": each, "content": "y"} for each in ids]
    return [
        USER,
        {"role": "assistant", "content": calls},
        {"role": "user", "content": answers},
    ]


def responses_calls(n: int) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = [USER]
    for i in range(n // 4):
        call = {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"}
        items += [call, {"type": "function_call_output", "call_id": f"c{i}", "output": "y"}]
    return items


#: By what is large: a route, and the body of that size.
BODIES: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "messages": (CHAT, lambda n: {"messages": [USER] * n}),
    "parts of a message": (
        CHAT,
        lambda n: {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * n}]},
    ),
    "tools": (CHAT, lambda n: {"messages": [USER], "tools": [tool(f"f{i}") for i in range(n)]}),
    "one tool": (CHAT, lambda n: {"messages": [USER], "tools": [tool("f", n)]}),
    "calls": (CHAT, lambda n: {"messages": openai_calls(n)}),
    "blocks": ("/v1/messages", lambda n: {"messages": anthropic_calls(n), "max_tokens": 1}),
    "items": ("/v1/responses", lambda n: {"input": responses_calls(n)}),
    "unknown fields": (COMPLETION, lambda n: {"prompt": "x", **{f"promp{i}": 1 for i in range(n)}}),
    "name of a field": (COMPLETION, lambda n: {"prompt": "x", "prompt" * n: 1}),
    "value that is quoted": (
        CHAT,
        lambda n: {"messages": [{"role": "unknown field `x` - at `$.a" * n, "content": "x"}]},
    ),
    "biases": (COMPLETION, lambda n: {"prompt": "x", "logit_bias": {i % 512: 1 for i in range(n)}}),
    "token ids": (COMPLETION, lambda n: {"prompt": [5] * n}),
    "prompts": (COMPLETION, lambda n: {"prompt": ["x"] * (n // 8), "max_tokens": 1}),
    "word": ("/tokenize", lambda n: {"prompt": "x" * 4 * n}),
    "blanks": ("/tokenize", lambda n: {"prompt": " " * 4 * n}),
    "tokens": ("/detokenize", lambda n: {"tokens": [5] * n}),
    "stop strings": (
        COMPLETION,
        lambda n: {"prompt": "x", "max_tokens": 20, "stop": [(n // 20) * "a"] * 32},
    ),
    "inline image": (
        CHAT,
        lambda n: {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image_url",
                            "image_url": {"url": "data:image/png;base64," + "A" * 20 * n},
                        }
                    ],
                }
            ]
        },
    ),
}


async def seconds(server: Server, path: str, body: dict[str, Any]) -> float:
    data = json.dumps({**({"max_tokens": 1} if path in (CHAT, COMPLETION) else {}), **body})
    began = time.process_time()
    answer = await server.request(
        "POST", path, data=data, headers={"Content-Type": "application/json"}
    )
    assert answer.status in (200, 400), answer
    return time.process_time() - began


async def test_the_time_of_a_body_grows_with_the_body_alone() -> None:
    async with running(SIMULATED) as server:
        for what, (path, make) in BODIES.items():
            await seconds(server, path, make(1))  # what is made once
            few = min([await seconds(server, path, make(FEW)) for _ in range(3)])
            many = await seconds(server, path, make(MANY))
            if many >= 24 * few + 0.1:  # 8 times as much; the square would be 64 times
                many = await seconds(server, path, make(MANY))
            assert many < 24 * few + 0.1, what
