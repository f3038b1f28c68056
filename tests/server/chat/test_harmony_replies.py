"""Replies in harmony over HTTP: told apart, streamed and whole, with their reasoning bound."""

import json

import pytest

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, ServerConfig
from tests.server.chat.harmony_model import harmony_model
from tests.server.scripted import EMBEDDED, saying
from tests.server.serving import running

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

# As gpt-oss's, in small: what was thought before an answer is left out; before a call it stays.
TEMPLATE = (
    "{% for m in messages %}<|start|>{% if m.tool_calls %}assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}~<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}{{ m.role }}<|message|>{{ m.content }}~{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"enum": [1, 2]}}}},
}
# The end of this model's texts is harmony's end of a message, so that the script may not hold it.
REPLY = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'


async def test_calls_in_harmony_are_read_whole_and_streamed_and_come_back_in_prompts(tmp_path):
    async with saying(REPLY, tmp_path, TEMPLATE, "<|pad|>", "m") as server:
        for stream in (False, True):
            answer = await server.chat(tools=[ADD], stream=stream)
            assert answer.status == 200, answer
            if stream:
                deltas = [event["choices"][0]["delta"] for event in answer.events()]
                said = [call for delta in deltas for call in delta.get("tool_calls", ())]
                arguments = "".join(each["function"]["arguments"] for each in said)
                content = "".join(delta.get("content") or "" for delta in deltas)
            else:
                message = answer.json()["choices"][0]["message"]
                arguments = message["tool_calls"][0]["function"]["arguments"]
                content = message["content"] or ""
            assert (json.loads(arguments), content) == ({"a": 1}, "")
        asked = [
            {"role": "user", "content": "One?"},
            {**message, "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "2"},
        ]
        server.say("<|channel|>final<|message|>Two.")
        answer = (await server.chat(messages=asked, tools=[ADD])).json()
        assert answer["choices"][0]["message"]["content"] == "Two."
        server.say("<|channel|>analysis<|message|>One and one.")
        answer = (await server.chat()).json()
        assert answer["choices"][0]["message"]["reasoning_content"] == "One and one."
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 2


async def test_a_budget_ends_the_message_of_analysis_and_begins_the_next(tmp_path):
    opened = "{{ messages[0].content }}<|start|>assistant<|channel|>analysis<|message|>"
    model = harmony_model(tmp_path, opened + "{# tools #}")
    (tmp_path / "model.safetensors").symlink_to(EMBEDDED / "model.safetensors")
    config = EngineConfig(
        model=ModelConfig(model=model, max_model_len=512, dtype="float32"),
        cache=CacheConfig(num_kv_blocks=128),
        runner=RunnerConfig(threads=1),
        server=ServerConfig(tool_call_parser="harmony"),
    )
    async with running(config) as server:
        for limit in (0, 5):
            answer = await server.chat(thinking_token_budget=limit, max_tokens=40, seed=3)
            assert answer.status == 200, answer
            usage = answer.json()["usage"]
            assert usage["completion_tokens_details"] == {"reasoning_tokens": limit}
            content = answer.json()["choices"][0]["message"]["content"]
            assert content.startswith("<|start|>assistant")  # it knows no headers
