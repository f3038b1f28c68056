"""Thinking budgets over HTTP, of a real model, and reasoning tokens in every usage."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)
from tests.server.scripted import THINKING, saying
from tests.server.serving import Server, running

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

THINKS = EngineConfig(
    model=ModelConfig(max_model_len=512, dtype="float32"),
    cache=CacheConfig(num_kv_blocks=128),
    scheduler=SchedulerConfig(max_num_seqs=8),
    runner=RunnerConfig(threads=1),
    server=ServerConfig(reasoning_parser="deepseek_r1"),
)
ASKED: dict[str, Any] = {"max_tokens": 40, "temperature": 1, "seed": 3, "ignore_eos": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"far": {"type": "boolean"}},
            "required": ["far"],
            "additionalProperties": False,
        },
    },
}


async def test_a_chat_keeps_to_its_budget_whole_and_streamed() -> None:
    async with running(THINKS) as server:
        for limit in (0, 1, 6, 20):
            fields = {**ASKED, "thinking_token_budget": limit}
            whole = (await server.chat(**fields)).json()
            message = whole["choices"][0]["message"]
            assert message["content"], limit
            assert bool(message.get("reasoning_content")) == (limit > 0), message
            assert whole["usage"]["completion_tokens"] == 40
            assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": limit}

            options = {"include_usage": True, "continuous_usage_stats": True}
            streamed = await server.chat(**fields, stream=True, stream_options=options)
            *chunks, last = streamed.events()
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            told = {
                name: "".join(delta.get(name, "") for delta in deltas)
                for name in ("content", "reasoning_content")
            }
            assert told["content"] == message["content"]
            assert told["reasoning_content"] == message.get("reasoning_content", "")
            assert last["usage"] == whole["usage"]
            counts = [
                chunk["usage"]["completion_tokens_details"]["reasoning_tokens"]
                for chunk in chunks
                if "completion_tokens_details" in (chunk["usage"] or ())
            ]
            assert counts == sorted(counts)
            assert counts[-1] == limit
        assert (await server.chat(**{**ASKED, "thinking_token_budget": -1})).json()["usage"][
            "completion_tokens_details"
        ] == {"reasoning_tokens": 40}


async def test_samples_logprobs_and_reasoning_that_is_left_in_the_content() -> None:
    async with running(THINKS) as server:
        fields = {**ASKED, "thinking_token_budget": 5}
        some = (await server.chat(**fields, n=3, logprobs=True)).json()
        assert some["usage"]["completion_tokens_details"]["reasoning_tokens"] == 15
        for choice in some["choices"]:
            tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
            assert len(tokens) == 40
            assert "".join(tokens[5:]).startswith("</think>")
        joined = (await server.chat(**fields, separate_reasoning=False)).json()
        assert joined["choices"][0]["message"]["content"].count("</think>") == 1
        assert joined["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
        hidden = (await server.chat(**fields, include_reasoning=False)).json()
        assert "reasoning_content" not in hidden["choices"][0]["message"]
        assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5


async def test_forced_calls_and_schemas_follow_the_forced_mark() -> None:
    own = msgspec.structs.replace(
        THINKS, server=ServerConfig(reasoning_parser="deepseek_r1", tool_call_parser="hermes")
    )
    async with running(own) as server:
        fields = {"max_tokens": 300, "temperature": 1, "seed": 5, "thinking_token_budget": 7}
        schema = {"name": "s", "schema": TOOL["function"]["parameters"]}  # type: ignore[index]
        bound = await server.chat(
            **fields, response_format={"type": "json_schema", "json_schema": schema}
        )
        assert isinstance(json.loads(bound.json()["choices"][0]["message"]["content"])["far"], bool)
        assert bound.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 7
        for strict in (False, True):
            tool = {**TOOL, "function": {**TOOL["function"], "strict": strict}}  # type: ignore[dict-item]
            called = (await server.chat(**fields, tools=[tool], tool_choice="required")).json()
            [call] = called["choices"][0]["message"]["tool_calls"]
            assert isinstance(json.loads(call["function"]["arguments"])["far"], bool)
            assert called["usage"]["completion_tokens_details"]["reasoning_tokens"] == 7
        # Where all of the text is bound there is no reasoning: the budget has nothing to end.
        chosen = await server.chat(**fields, structured_outputs={"choice": ["yes", "no"]})
        assert chosen.json()["choices"][0]["message"]["content"] in ("yes", "no")


async def test_messages_and_responses_keep_to_their_budgets() -> None:
    async with running(THINKS) as server:
        turn = [{"role": "user", "content": "Who's there?"}]
        thinking = {"type": "enabled", "budget_tokens": 4}
        body = {"messages": turn, "max_tokens": 30, "temperature": 0, "thinking": thinking}
        message = (await server.request("POST", "/v1/messages", json=body)).json()
        assert [block["type"] for block in message["content"]] == ["thinking", "text"]

        for fields, count in (
            ({"thinking_token_budget": 4}, 4),
            ({"reasoning": {"max_tokens": 9}}, 9),
            ({"reasoning": {"max_tokens": 9}, "thinking_token_budget": 9}, 9),
        ):
            asked = {"input": "Who's there?", "max_output_tokens": 30, "temperature": 0, **fields}
            response = (await server.request("POST", "/v1/responses", json=asked)).json()
            details = response["usage"]["output_tokens_details"]
            assert details == {"reasoning_tokens": count}
            assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
            streamed = await server.request("POST", "/v1/responses", json={**asked, "stream": True})
            *_, (_, last) = streamed.named_events()
            assert last["response"]["usage"]["output_tokens_details"] == details


async def test_a_message_is_written_before_the_mark_if_the_settings_have_one() -> None:
    server_config = ServerConfig(
        reasoning_parser="deepseek_r1", reasoning_budget_message="\nThat will do.\n"
    )
    async with running(msgspec.structs.replace(THINKS, server=server_config)) as server:
        told = (await server.chat(**ASKED, thinking_token_budget=6)).json()
        assert told["choices"][0]["message"]["reasoning_content"].endswith("\nThat will do.")
        assert told["usage"]["completion_tokens_details"]["reasoning_tokens"] > 6


async def refused(server: Server, path: str, **body: Any) -> str:
    answer = await server.request("POST", path, json=body)
    assert answer.status == 400, answer
    message = answer.json()["error"]["message"]
    assert isinstance(message, str)
    return message


async def test_budgets_that_mean_nothing_are_refused_by_the_name_of_their_field() -> None:
    turn = [{"role": "user", "content": "?"}]
    async with running(THINKS) as server:
        for path, body, said in (
            ("chat/completions", {"messages": turn, "thinking_token_budget": -2}, "at least -1"),
            ("completions", {"prompt": "a", "thinking_token_budget": 2}, "/v1/chat/completions"),
            ("chat/completions", {"messages": turn, "thinking_budget": 5}, "thinking_token_budget"),
            ("responses", {"input": "?", "reasoning": {"max_tokens": -3}}, "reasoning.max_tokens"),
            (
                "responses",
                {"input": "?", "reasoning": {"max_tokens": 3}, "thinking_token_budget": 4},
                "they differ",
            ),
        ):
            assert said in await refused(server, f"/v1/{path}", **body)
    plain = msgspec.structs.replace(THINKS, server=ServerConfig())
    async with running(plain) as server:
        said = await refused(server, "/v1/chat/completions", messages=turn, thinking_token_budget=2)
        assert "no known marks of reasoning" in said
        assert "completion_tokens_details" not in (await server.chat(max_tokens=2)).json()["usage"]
        # A model that does not reason keeps to any budget: agents state one with every request.
        thinking = {"type": "enabled", "budget_tokens": 1024}
        body = {"messages": turn, "max_tokens": 3, "thinking": thinking}
        assert (await server.request("POST", "/v1/messages", json=body)).status == 200


async def test_reasoning_tokens_are_counted_in_what_a_model_says_by_itself(tmp_path: Any) -> None:
    async with saying("I wonder.\n</think>\n\nYes.", tmp_path, THINKING) as server:
        for fields in ({}, {"tools": [TOOL]}):
            usage = (await server.chat(**fields)).json()["usage"]
            thought = usage["completion_tokens_details"]["reasoning_tokens"]
            assert 0 < thought < usage["completion_tokens"] - 3
        server.say("Yes.")  # it never ends
        usage = (await server.chat()).json()["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_reasoning_tokens_of_harmony_are_counted_over_all_its_messages(
    tmp_path: Path,
) -> None:
    analysis, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    text = f"{analysis}Hm.{end}{analysis}Yes.{end}<|channel|>final<|message|>No."
    template = "{{ messages[-1].content }}<|start|>assistant"
    async with saying(text, tmp_path, template, tool_call_parser="harmony") as server:
        tokenizer = server.engine.model_info.tokenizer
        length = len(tokenizer.encode(text, add_special_tokens=False))
        # Its <|end|> would end a reply of the embedded model.
        told = (await server.chat(ignore_eos=True, max_tokens=length)).json()
        thought = [tokenizer.encode(t, add_special_tokens=False) for t in ("Hm.", "Yes.")]
        assert told["choices"][0]["message"]["content"] == "No."
        details = told["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == sum(map(len, thought))


async def test_tokens_that_say_nothing_yet_are_counted_in_a_stream(tmp_path: Any) -> None:
    # Of the characters of several tokens, all but the last token say nothing.
    async with saying("漢字🦊 ist es.\n</think>Yes.", tmp_path, THINKING) as server:
        whole = (await server.chat()).json()["usage"]
        options = {"include_usage": True}
        *_, last = (await server.chat(stream=True, stream_options=options)).events()
        assert last["usage"] == whole
        assert whole["completion_tokens_details"]["reasoning_tokens"] > 10
        asked = {"input": "?", "stream": True}
        streamed = await server.request("POST", "/v1/responses", json=asked)
        *_, (_, done) = streamed.named_events()
        details = done["response"]["usage"]["output_tokens_details"]
        assert details == whole["completion_tokens_details"]
