"""Calls in tags and ids of the model's own, over HTTP: streamed, typed, and handed back."""

import json

import pytest

from tests.server.scripted import saying

WRITE = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "mode": {"type": "integer"}},
        },
    },
}
QWEN = "{{ tools }} <tool_call><function=a><parameter=b> {{ messages | tojson }}"
KIMI = """\
{{ tools }}{% for message in messages %}
{% if message.role == 'tool' %}## Return of {{ message.tool_call_id }}: {% endif -%}
{{ message.content }}
{% for call in message.tool_calls or [] %}<|tool_calls_section_begin|>{{ call.id }}
{{- call.function.arguments | tojson }}{% endfor %}
{% endfor %}"""


@pytest.fixture
def say(tmp_path):
    return lambda text, template, **settings: saying(text, tmp_path, template, **settings)


async def test_a_file_that_an_agent_writes_is_streamed_and_its_mode_is_a_number(say):
    program = "".join(f'print("line {i} < {i + 1}")\n' for i in range(40))
    text = (
        f"I see.\n\n<tool_call>\n<function=write>\n<parameter=text>\n{program}\n</parameter>\n"
        "<parameter=mode>\n420\n</parameter>\n</function>\n</tool_call>"
    )
    async with say(text, QWEN) as server:
        whole = await server.chat(tools=[WRITE], max_tokens=4000)
        choice = whole.json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "I see."
        [call] = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"text": program, "mode": 420}
        streamed = await server.chat(tools=[WRITE], stream=True, max_tokens=4000)
        deltas = [event["choices"][0]["delta"] for event in streamed.events() if event["choices"]]
        pieces = [
            call["function"]["arguments"]
            for delta in deltas
            for call in delta.get("tool_calls") or ()
            if call["function"].get("arguments")
        ]
        assert "".join(pieces) == call["function"]["arguments"]
        assert len(pieces) > 40


async def test_the_ids_of_kimi_are_its_own_and_go_back(say):
    calls = "".join(
        f"<|tool_call_begin|>functions.write:{i}<|tool_call_argument_begin|>"
        f'{{"mode": {i}}}<|tool_call_end|>'
        for i in (3, 4)
    )
    text = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"
    async with say(text, KIMI) as server:
        message = (await server.chat(tools=[WRITE])).json()["choices"][0]["message"]
        ids = [call["id"] for call in message["tool_calls"]]
        assert ids == ["functions.write:3", "functions.write:4"]
        results = [{"role": "tool", "tool_call_id": each, "content": "Done."} for each in ids]
        messages = [{"role": "user", "content": "?"}, message, *results]
        asked = {"messages": messages, "tools": [WRITE]}
        tokens = (await server.request("POST", "/tokenize", json=asked)).json()["tokens"]
        told = (await server.request("POST", "/detokenize", json={"tokens": tokens})).json()
        assert "## Return of functions.write:3: Done." in told["prompt"]
        assert '<|tool_calls_section_begin|>functions.write:4{"mode": 4}' in told["prompt"]
