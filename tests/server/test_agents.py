"""What command-line agents send, in a few words of our own: Codex 0.169 and Claude Code 2.1.

Each body has the fields and types of blocks, items and tools of a recorded one.
"""

import asyncio
import json
import logging
from itertools import product

import openai
import pydantic
import pytest
from openai.types.responses import ResponseStreamEvent

from aioserve.config import EngineConfig, RunnerConfig, ServerConfig
from tests.server.bad_bodies import check
from tests.server.scripted import CHATML, HERMES, SYSTEM_FIRST, saying
from tests.server.serving import running

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {"cmd": {"type": "string"}},
    "required": ["cmd"],
    "additionalProperties": False,
}


def call(name, **arguments):
    told = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{told}\n</tool_call>"


def text(kind, words):
    return [{"type": kind, "text": words}]


CODEX = {
    "model": "embedded",
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": text("input_text", "You work in a terminal."),
        },
        {
            "type": "message",
            "id": "msg_2",
            "role": "developer",
            "content": [
                {"type": "input_text", "text": "Skills: none."},
                {"type": "input_text", "text": "Everything is allowed."},
            ],
        },
        {"type": "message", "role": "user", "content": text("input_text", "The folder is /w.")},
        {"type": "message", "role": "user", "content": text("input_text", "Read note.txt")},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command.",
            "strict": False,
            "parameters": SCHEMA,
        },
        {
            "type": "namespace",
            "name": "crew",
            "description": "Other agents.",
            "tools": [
                {
                    "type": "function",
                    "name": "close",
                    "description": "Ends an agent.",
                    "strict": False,
                    "defer_loading": True,
                    "parameters": SCHEMA,
                }
            ],
        },
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "high", "summary": "auto"},
    "text": {"verbosity": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "1f46",
    "client_metadata": {"turn_id": "7"},
    "service_tier": "priority",
}
CLAUDE_CODE = {
    "model": "embedded",
    "max_tokens": 500,
    "system": [
        {"type": "text", "text": "version 2.1"},
        {"type": "text", "text": "Use your tools.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Today is Friday."},
                {"type": "text", "text": "Read it", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "One agent is there."},
    ],
    "tools": [
        {"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA},
        {"name": "Later", "input_schema": SCHEMA, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": '{"device_id": "e1"}'},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
BETAS = {"anthropic-beta": "claude-code-20250219,context-management-2025-06-27,effort-2025-11-24"}
NO_JSON = '<tool_call>\n{"name": "Read", "arguments": {"cmd": tru}}\n</tool_call>'
READING = call("Read", cmd="cat note.txt")


def text_of(response):
    return response["output"][0]["content"][0]["text"]


async def tokens_of(server, messages):
    answer = await server.request("POST", "/tokenize", json={"messages": messages})
    assert answer.status == 200, answer.body
    return answer.json()["tokens"]


async def respond(server, **fields):
    answer = await server.request("POST", "/v1/responses", json={**CODEX, **fields})
    assert answer.status == 200, answer.body
    return answer


async def tell(server, **fields):
    body = {**CLAUDE_CODE, **fields}
    path = "/v1/messages?beta=true"
    answer = await server.request("POST", path, json=body, headers=BETAS)
    assert answer.status == 200, answer.body
    return answer


@pytest.mark.parametrize("template", [CHATML, SYSTEM_FIRST], ids=["anywhere", "first"])
async def test_codex_calls_a_function_and_one_of_a_namespace(tmp_path, template):
    said = "I look.\n" + call("exec_command", cmd="cat note.txt") + call("crew__close", cmd="x")
    async with saying(said, tmp_path, template) as server:
        whole = (await respond(server)).json()
        _, first, second = whole["output"]
        assert (first["name"], "namespace" in first) == ("exec_command", False)
        assert (second["name"], second["namespace"]) == ("close", "crew")
        *_, (_, last) = (await respond(server, stream=True)).named_events()
        told = [[item.get(n) for n in ("name", "namespace")] for item in last["response"]["output"]]
        assert told == [[item.get(n) for n in ("name", "namespace")] for item in whole["output"]]
        assert whole["tools"] == CODEX["tools"]
        server.say("Done.")
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "plover"}
            for item in (first, second)
        ]
        items = [
            *CODEX["input"],
            {"type": "reasoning", "summary": [], "encrypted_content": "AAAA"},
            *whole["output"],
            {"type": "web_search_call", "id": "ws_1", "action": {"type": "search", "query": "x"}},
            *outputs,
        ]
        assert (await respond(server, input=items)).json()["output"][0]["content"][0][
            "text"
        ] == "Done."


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


async def test_a_custom_tool_is_called_with_a_text(tmp_path):
    patch = '*** Begin "Patch"\n+plover\n'
    as_openai = pydantic.TypeAdapter(ResponseStreamEvent)
    async with saying("", tmp_path, CHATML) as server:
        for stream in (False, True):
            server.say(call("apply_patch", input=patch))
            answer = await respond(server, tools=[PATCH, *CODEX["tools"]], stream=stream)
            if stream:
                events = list(answer.named_events())
                for _, data in events:
                    as_openai.validate_python(data)
                told = [data for name, data in events if "custom_tool_call_input" in name]
                assert [each.get("delta", each.get("input")) for each in told] == [patch, patch]
                [item] = events[-1][1]["response"]["output"]
            else:
                [item] = answer.json()["output"]
            called = item["type"], item["name"], item["input"]
            assert called == ("custom_tool_call", "apply_patch", patch)
            server.say("Done.")
            output = {
                "type": "custom_tool_call_output",
                "call_id": item["call_id"],
                "output": "1 file changed",
            }
            gone_on = await respond(server, input=[*CODEX["input"], item, output], tools=[PATCH])
            assert text_of(gone_on.json()) == "Done."


async def test_what_only_a_vendor_runs_is_logged_once_for_each_request(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with saying("Hello", tmp_path, CHATML) as server:
        for ask, words in (
            (respond(server), "the tool web_search"),
            (
                tell(server, mcp_servers=[{"type": "url"}]),
                "MCP servers, the tool web_search_20250305",
            ),
            (
                server.chat(tools=[{"type": "code_interpreter", "container": {}}]),
                "code_interpreter",
            ),
            (server.chat(web_search_options={}), "web search"),
        ):
            caplog.clear()
            assert (await ask).status == 200
            [line] = [r.getMessage() for r in caplog.records if "passed over" in r.getMessage()]
            assert line.endswith(words)
        caplog.clear()
        assert (await server.chat()).status == 200
        assert "passed over" not in caplog.text


async def prompt_of(server, path, body):
    """How many tokens its prompt has."""
    answer = await server.request("POST", path, json=body)
    assert answer.status == 200, answer.body
    return answer.json()["input_tokens"]


async def test_the_tools_of_vendors_are_not_told_to_the_model(tmp_path):
    async with saying("Hello", tmp_path, CHATML) as server:
        for path, body in (
            ("/v1/responses/input_tokens", CODEX),
            ("/v1/messages/count_tokens", CLAUDE_CODE),
        ):
            own = {**body, "tools": body["tools"][:2]}
            assert await prompt_of(server, path, body) == await prompt_of(server, path, own)
            fewer = {**body, "tools": body["tools"][:1]}
            assert await prompt_of(server, path, fewer) < await prompt_of(server, path, own)


async def test_claude_code_reads_finds_a_tool_and_goes_on(tmp_path):
    async with saying(READING, tmp_path, SYSTEM_FIRST) as server:
        [called] = (await tell(server)).json()["content"]
        assert (called["type"], called["input"]) == ("tool_use", {"cmd": "cat note.txt"})
        events = list((await tell(server, stream=True)).named_events())
        assert [name for name, _ in events][-1] == "message_stop"
        server.say("plover")
        found = [{"type": "tool_reference", "tool_name": "Later"}]
        turns = [
            *CLAUDE_CODE["messages"],
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "AAAA"},
                    {**called, "caller": {"type": "direct"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": called["id"], "content": found}],
            },
            {"role": "system", "content": "Time flies."},
        ]
        thinking = {"type": "enabled", "budget_tokens": 2048}
        [said] = (await tell(server, messages=turns, thinking=thinking)).json()["content"]
        assert said == {"type": "text", "text": "plover"}


@pytest.mark.parametrize("template", [CHATML, SYSTEM_FIRST], ids=["anywhere", "first"])
async def test_a_late_system_message_is_the_systems_where_the_template_takes_it(tmp_path, template):
    user, late = {"role": "user", "content": "Who?"}, {"role": "system", "content": "Be brief."}
    folded = {"role": "user", "content": "Who?\n\nBe brief.\n\nNow."}
    now = {"role": "user", "content": "Now."}
    first = {"role": "system", "content": "I"}
    async with saying("Hello", tmp_path, template) as server:
        texts = [
            await tokens_of(server, messages)
            for messages in ([first, user, late, now], [first, folded])
        ]
    assert (texts[0] == texts[1]) == (template is SYSTEM_FIRST)


async def test_responses_serve_the_fields_of_the_sampler_beside_unknown_ones_that_are_ignored():
    ask = {"input": "Who's there?", "max_output_tokens": 9, "temperature": 1}
    config = EngineConfig(
        runner=RunnerConfig(threads=1), server=ServerConfig(ignore_unknown_fields=True)
    )
    async with running(config) as server:

        async def answer(**fields):
            got = await server.request("POST", "/v1/responses", json={**ask, "zzz": 1, **fields})
            return got.status, got.json()

        status, told = await answer(structured_outputs={"choice": ["yes"]}, seed=3)
        assert (status, text_of(told)) == (200, "yes")
        for wrong in ({"top_k": -5}, {"stop": [""]}, {"seed": "x"}, {"min_p": 2}):
            assert (await answer(**wrong))[0] == 400
        texts = [text_of((await answer(top_k=1, seed=seed))[1]) for seed in (1, 2)]
        assert texts[0] == texts[1]
        stopped = await answer(top_k=1, stop=texts[0][2:])
        assert text_of(stopped[1]) == texts[0][:2]
        assert [(await answer(request_id="resp_mine"))[0] for _ in "ab"] == [200, 409]
        long = {"input": "word " * 20_000, "max_output_tokens": 1}
        assert [(await answer(**long, truncation=t))[0] for t in ("disabled", "auto")] == [400, 200]


async def test_hints_are_taken_on_every_route_and_a_misspelt_field_is_not(server):
    hints = {
        "reasoning_effort": "high",
        "verbosity": "low",
        "store": True,
        "provider": {"order": ["x"]},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "flex",
        "prediction": {"type": "content", "content": "x"},
        "include": ["x"],
        "stream_options": {"include_obfuscation": True},
        "stream": True,
    }
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part]}]
    assert (await server.chat(**hints, messages=messages)).status == 200
    assert (await server.complete(**hints)).status == 200
    error = check(await server.chat(reasoning_efort="high"))
    assert error["code"] == "unknown_parameter"
    assert "did you mean 'reasoning_effort'?" in error["message"]


#: What the model says, which of its blocks are texts and calls, and why it stops.
BROKEN = [
    (NO_JSON, "t", "end_turn"),
    ('<tool_call>\n{"name": "Read", "arguments": [1]}\n</tool_call>', "t", "end_turn"),
    (READING, "t", "max_tokens"),
    (NO_JSON + READING, "tc", "tool_use"),
    (READING + NO_JSON, "ct", "tool_use"),
    (READING + READING, "cc", "tool_use"),
]


def blocks_of(answer, stream):
    """The blocks of a message, and why it ends."""
    if not stream:
        return answer.json()["content"], answer.json()["stop_reason"]
    events = [data for _, data in answer.named_events()]
    blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    for e in (e for e in events if e["type"] == "content_block_delta"):
        if e["delta"]["type"] == "input_json_delta":
            blocks[e["index"]]["input"] = json.loads(e["delta"]["partial_json"])
        else:
            blocks[e["index"]]["text"] += e["delta"]["text"]
    [stop] = [e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta"]
    return blocks, stop


async def test_a_call_that_is_not_whole_is_given_back_as_text(tmp_path):
    async with saying("", tmp_path, CHATML) as server:
        for (said, kinds, reason), stream in product(BROKEN, (False, True)):
            server.say(said)
            limit = {"max_tokens": 24} if reason == "max_tokens" else {}
            blocks, stop = blocks_of(await tell(server, stream=stream, **limit), stream)
            told = "".join("c" if b["type"] == "tool_use" else "t" for b in blocks)
            assert (told, stop) == (kinds, reason), (said, stream)
            for block in blocks:
                if block["type"] == "tool_use":
                    assert block["input"] == {"cmd": "cat note.txt"}
                else:
                    assert '"Read"' in block["text"]


async def test_openais_client_counts_input_tokens(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        counted = await client.responses.input_tokens.count(model="embedded", input="Who's there?")
        whole = await client.responses.create(model="embedded", input="Who's there?")
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == whole.usage.input_tokens


async def test_fields_that_make_no_prompt_change_no_count_and_have_to_make_sense(server):
    turn = [{"role": "user", "content": "Who's there?"}]
    for path, body in (
        ("/v1/responses/input_tokens", {"input": "Who's there?"}),
        ("/v1/messages/count_tokens", {"messages": turn}),
    ):
        counts = [
            await prompt_of(server, path, {**body, **fields})
            for fields in ({}, {"temperature": 1, "top_k": 5, "stop": "x", "stream": True})
        ]
        assert counts[0] == counts[1]
        answer = await server.request("POST", path, json={**body, "min_tokens": -1})
        assert "min_tokens must be at least 0" in check(answer)["message"]


async def test_anthropics_tool_runner_goes_on_without_a_thread(tmp_path):
    import anthropic

    asked = []

    @anthropic.beta_async_tool
    async def read(cmd: str) -> str:
        """Read a file.

        Args:
            cmd: what to run
        """
        asked.append(cmd)
        server.say("plover")
        return "plover"

    async with (
        saying(call("read", cmd="x"), tmp_path, CHATML) as server,
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client,
    ):
        runner = client.beta.messages.tool_runner(
            model="embedded",
            max_tokens=200,
            tools=[read],
            messages=[{"role": "user", "content": "Read it"}],
        )
        last = await runner.until_done()
    assert asked == ["x"]
    assert last.content[0].text == "plover"


async def test_a_call_beside_no_content_leaves_no_word_none_in_the_prompt(tmp_path):
    made = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "Read"},
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c1", "content": "plover"},
    ]
    for template in (CHATML, HERMES):
        async with saying("Hello", tmp_path, template) as server:
            [null] = [await tokens_of(server, turns)]
            turns[1]["content"] = ""
            assert await tokens_of(server, turns) == null
            turns[1]["content"] = None
            answer = await server.request("POST", "/detokenize", json={"tokens": null})
            assert "None" not in answer.json()["prompt"]


async def test_a_title_that_an_agent_asks_for_beside_its_question_ends_no_other_reply(tmp_path):
    """Codex does so at any time, as JSON, which no script of a test fits."""
    wanted = {"type": "json_schema", "name": "title", "strict": True, "schema": SCHEMA}
    asked = [{"text": {"format": wanted}} if number % 2 else {} for number in range(4)]
    async with saying("As I said, plover.", tmp_path, SYSTEM_FIRST) as server:
        answers = await asyncio.gather(
            *(
                server.request("POST", "/v1/responses", json={"input": "Which word?", **fields})
                for fields in asked
            )
        )
    assert [answer.status for answer in answers] == [200] * 4
    assert [text_of(answer.json()) for answer in answers[::2]] == ["As I said, plover."] * 2
