"""One conversation with tools over each wire format, by the packages of those who made it.

Knows how a call, its result and an answer are written there, whole and in pieces. Knows nothing
about what a model says.
"""

import json
from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import openai

SYSTEM = "You are a helpful assistant. Use the tools for weather and for sums."
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}
ABOUT = {
    "get_weather": "The current weather in a city.",
    "add": "The sum of two integers.",
}
Choice = Literal["auto", "required", "named", "none"]


class Call(NamedTuple):
    """What the model calls."""

    id: str
    name: str
    arguments: dict[str, Any]


class Reply(NamedTuple):
    """What the model says and calls, and why it ends."""

    text: str
    calls: tuple[Call, ...]
    reason: str

    def without_ids(self) -> tuple[Any, ...]:
        """What two replies to one prompt have in common."""
        return self.text, [(call.name, call.arguments) for call in self.calls], self.reason


class Dialogue(ABC):
    """What was said so far, with the server at `url`."""

    reason: str  # why a reply ends that calls a tool

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self.said: list[dict[str, Any]] = []

    def tell(self, question: str) -> None:
        """The user says something."""
        self.said.append({"role": "user", "content": question})

    @abstractmethod
    def ask(self, choice: Choice, tool: str, *, is_streamed: bool) -> Reply:
        """The model's next reply, which is noted; a `named` one calls `tool`."""

    @abstractmethod
    def give(self, call: Call, result: str) -> None:
        """What a tool has returned."""


class OverChat(Dialogue):
    """/v1/chat/completions by the package openai."""

    reason = "tool_calls"

    def ask(self, choice: Choice, tool: str, *, is_streamed: bool) -> Reply:
        named = {"type": "function", "function": {"name": tool}}
        asked: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "system", "content": SYSTEM}, *self.said],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": name, "description": ABOUT[name], "parameters": schema},
                }
                for name, schema in TOOLS.items()
            ],
            "tool_choice": named if choice == "named" else choice,
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_tokens": 128,
        }
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            if is_streamed:
                with client.chat.completions.stream(**asked) as stream:
                    done = stream.get_final_completion()
            else:
                done = client.chat.completions.create(**asked)
        choice_made = done.choices[0]
        message = choice_made.message
        self.said.append(
            {
                "role": "assistant",
                "content": message.content,
                **(
                    {"tool_calls": [_plain(call) for call in message.tool_calls]}
                    if message.tool_calls
                    else {}
                ),
            }
        )
        calls = tuple(
            Call(call.id, call.function.name, json.loads(call.function.arguments))
            for call in message.tool_calls or ()
        )
        return Reply(message.content or "", calls, str(choice_made.finish_reason))

    def give(self, call: Call, result: str) -> None:
        self.said.append({"role": "tool", "tool_call_id": call.id, "content": result})


def _plain(call: Any) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


class OverResponses(Dialogue):
    """/v1/responses by the package openai."""

    reason = "completed"

    def ask(self, choice: Choice, tool: str, *, is_streamed: bool) -> Reply:
        asked: dict[str, Any] = {
            "model": self.model,
            "instructions": SYSTEM,
            "input": self.said,
            "tools": [
                {
                    "type": "function",
                    "name": name,
                    "description": ABOUT[name],
                    "parameters": schema,
                    "strict": False,
                }
                for name, schema in TOOLS.items()
            ],
            "tool_choice": {"type": "function", "name": tool} if choice == "named" else choice,
            "parallel_tool_calls": False,
            "temperature": 0,
            "max_output_tokens": 128,
            "store": False,
        }
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            if is_streamed:
                with client.responses.stream(**asked) as stream:
                    done: Any = stream.get_final_response()
            else:
                done = client.responses.create(**asked)
        self.said += [item.model_dump(exclude_none=True, mode="json") for item in done.output]
        for item in self.said:
            item.pop("parsed_arguments", None)
        calls = tuple(
            Call(item.call_id, item.name, json.loads(item.arguments))
            for item in done.output
            if item.type == "function_call"
        )
        return Reply(done.output_text, calls, str(done.status))

    def give(self, call: Call, result: str) -> None:
        self.said.append({"type": "function_call_output", "call_id": call.id, "output": result})


class OverMessages(Dialogue):
    """/v1/messages by the package anthropic."""

    reason = "tool_use"

    def ask(self, choice: Choice, tool: str, *, is_streamed: bool) -> Reply:
        alone = {"disable_parallel_tool_use": True}
        choices: dict[str, dict[str, Any]] = {
            "auto": {"type": "auto", **alone},
            "required": {"type": "any", **alone},
            "named": {"type": "tool", "name": tool, **alone},
            "none": {"type": "none"},
        }
        asked: dict[str, Any] = {
            "model": self.model,
            "system": SYSTEM,
            "messages": self.said,
            "tools": [
                {"name": name, "description": ABOUT[name], "input_schema": schema}
                for name, schema in TOOLS.items()
            ],
            "tool_choice": choices[choice],
            "extra_body": {"temperature": 0},
            "max_tokens": 128,
        }
        import anthropic  # two seconds: not while tests are collected

        with anthropic.Anthropic(base_url=self.url, api_key="none", max_retries=0) as client:
            if is_streamed:
                with client.messages.stream(**asked) as stream:
                    done: Any = stream.get_final_message()
            else:
                done = client.messages.create(**asked)
        blocks = [block.model_dump(exclude_none=True, mode="json") for block in done.content]
        kept = {"text": ("type", "text"), "tool_use": ("type", "id", "name", "input")}
        content = [{key: block[key] for key in kept[block["type"]]} for block in blocks]
        self.said.append({"role": "assistant", "content": content})
        text = "".join(block.text for block in done.content if block.type == "text")
        calls = tuple(
            Call(block.id, block.name, block.input)
            for block in done.content
            if block.type == "tool_use"
        )
        return Reply(text, calls, str(done.stop_reason))

    def give(self, call: Call, result: str) -> None:
        block = {"type": "tool_result", "tool_use_id": call.id, "content": result}
        self.said.append({"role": "user", "content": [block]})


DIALOGUES: dict[str, type[Dialogue]] = {
    "chat": OverChat,
    "responses": OverResponses,
    "messages": OverMessages,
}
