"""Anthropic's `anthropic` package against a running server, and what it does not show."""

import asyncio
import json

import msgspec
import pydantic
import pytest

from aioserve.apis.anthropic import template_messages, tools_of
from aioserve.apis.anthropic.protocol import CountTokensRequest
from aioserve.config import EngineConfig, ImageConfig, RunnerConfig, ServerConfig
from aioserve.server.images import ImageParts
from tests.processes import PATIENCE
from tests.server.bad_bodies import check, mutations
from tests.server.raw_client import fail_what_runs
from tests.server.scripted import HERMES, THINKING, TWO_CALLS, saying
from tests.server.serving import running

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

TURN = {"role": "user", "content": "Speak, I charge thee, speak!"}
BODY = {"model": "embedded", "messages": [TURN], "max_tokens": 24, "temperature": 0}
# The package sends sampling parameters only as extra fields.
ASKED = {k: v for k, v in BODY.items() if k != "temperature"} | {"extra_body": {"temperature": 0}}
BLOCKS = {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}


DOCUMENT = {
    "type": "document",
    "title": "Log",
    "context": "of today",
    "source": {"type": "text", "media_type": "text/plain", "data": "All is well."},
    "citations": {"enabled": True},
}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
IMAGE = {"type": "image", "source": {"type": "url", "url": "https://pictures.example/a"}}
TOOLS = [
    {
        "name": name,
        "description": "does it",
        "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }
    for name in ("add", "sub")
]
FORM = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
CALLED = {"role": "assistant", "content": "It is"}
TO_SELL = {"type": "tool", "name": "sell"}
CALLING = [
    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
    {"type": "text", "text": "So."},
    {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}},
]
ANSWERS = {
    "role": "user",
    "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": "3", "is_error": True},
        {"type": "text", "text": "Well?"},
    ],
}


@pytest.fixture
async def url():
    async with running(EngineConfig(runner=RunnerConfig(threads=1))) as server:
        yield server.url


def client_of(url):
    import anthropic  # two seconds: not while tests are collected

    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


async def test_whole_and_streamed_agree_and_the_tokens_are_counted(url):
    async with client_of(url) as client:
        whole = await client.messages.create(**ASKED, **BLOCKS)
        assert (whole.type, whole.role, whole.model) == ("message", "assistant", "embedded")
        assert whole._request_id == whole.id
        assert whole.id.startswith("msg_")
        async with client.messages.stream(**ASKED, **BLOCKS) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert [block.text for block in whole.content] == [text] == [final.content[0].text]
        assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, None)
        assert final.usage.output_tokens == whole.usage.output_tokens
        counted = await client.messages.count_tokens(model="embedded", messages=[TURN], **BLOCKS)
        for usage in (whole.usage, final.usage):
            assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens


def use_sync_client(url):
    """Runs in a thread: the loop serves meanwhile."""
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**ASKED)
        events = list(client.messages.create(**ASKED, stream=True))
        kinds = [event.type for event in events]
        text = "".join(e.delta.text for e in events if e.type == "content_block_delta")
        assert text == whole.content[0].text
        deltas = kinds.count("content_block_delta")
        assert kinds == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * deltas,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]


async def test_the_sync_client_works(url):
    await asyncio.to_thread(use_sync_client, url)


async def test_errors_arrive_as_the_packages_own_exceptions(start_server):
    import anthropic

    async with start_server(scheduler={"max_num_seqs": 1, "max_waiting_requests": 1}) as server:
        async with client_of(server.url) as client:
            bad, unknown = anthropic.BadRequestError, anthropic.NotFoundError
            for change, kind, cause, message in (
                ({"extra_body": {"temperature": -1}}, bad, "invalid_request_error", "temperature"),
                ({"extra_body": {"temperature": 2.1}}, bad, "invalid_request_error", "temperature"),
                ({"max_tokens": 0}, bad, "invalid_request_error", "max_tokens"),
                ({"stop_sequences": [""]}, bad, "invalid_request_error", "stop_sequences: stop"),
                ({"model": "claude"}, unknown, "not_found_error", "'embedded'"),
            ):
                with pytest.raises(kind, match=message) as caught:
                    await client.messages.create(**{**ASKED, **change})
                assert caught.value.body["error"]["type"] == cause
            many = [client.messages.create(**ASKED) for _ in range(9)]
            refused = [
                e
                for e in await asyncio.gather(*many, return_exceptions=True)
                if isinstance(e, Exception)
            ]
            assert {error.status_code for error in refused} == {529}
            assert all(int(error.response.headers["Retry-After"]) >= 1 for error in refused)
        wrong_path = await server.get("/v1/messages")
        assert (wrong_path.status, wrong_path.json()["type"]) == (405, "error")


async def test_leaving_a_stream_aborts_it(server):
    async with client_of(server.url) as client:
        async with client.messages.stream(**{**ASKED, "max_tokens": 4000}) as stream:
            async for _ in stream.text_stream:
                break
        async with asyncio.timeout(PATIENCE):
            while any((await server.gauges()).values()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)


async def ask(server, **fields):
    return await server.request("POST", "/v1/messages", json={**BODY, **fields})


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_stopped_is_told_in_anthropics_words(start_server, stream):
    async def stop(**fields):
        answer = await ask(server, **fields, stream=stream)
        told = dict(answer.named_events())["message_delta"]["delta"] if stream else answer.json()
        return told["stop_reason"], told["stop_sequence"]

    # the simulated model ends its reply by itself after some tokens
    async with start_server(runner={"simulated_output_tokens": 9}) as server:
        assert await stop(max_tokens=20) == ("end_turn", None)
        assert await stop(max_tokens=5) == ("max_tokens", None)
        text = (await ask(server)).json()["content"][0]["text"]
        assert await stop(stop_sequences=["never", text[2:4]]) == ("stop_sequence", text[2:4])
        assert await stop(timeout=1e-9) == ("timeout", None)
    limits = {"model": {"max_model_len": 64}, "runner": {"simulated_output_tokens": 4000}}
    async with start_server(**limits) as server:
        assert await stop(max_tokens=4000) == ("model_context_window_exceeded", None)


async def test_a_stream_that_fails_ends_with_anthropics_error(start_server, monkeypatch):
    async with start_server(runner={"step_base_ms": 5}) as server:
        answering = asyncio.create_task(ask(server, max_tokens=4000, stream=True))
        await fail_what_runs(server, monkeypatch)
        *_, (name, event) = (await answering).named_events()
        assert name == "error"
        assert event["error"] == {"type": "api_error", "message": "internal server error"}


async def test_the_client_and_the_extensions_reach_the_engine(server, monkeypatch):
    asked = []
    add_request = server.engine.add_request

    async def note(prompt, params, **fields):
        asked.append(fields)
        return await add_request(prompt, params, **fields)

    monkeypatch.setattr(server.front, "add_request", note)
    own = {"request_id": "x", "priority": -1, "timeout": 60.0, "cache_salt": "s"}
    assert (await ask(server, metadata={"user_id": "ann"}, **own)).json()["id"] == "x"
    own |= {"user": "ann", "client": "127.0.0.1", "adapter": "embedded"}
    assert asked == [own]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {"messages": [TURN, {"role": "assistant", "content": CALLING}, ANSWERS]},
            [
                TURN,
                {
                    "role": "assistant",
                    "content": "So.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [
                        {
                            "id": "t",
                            "type": "function",
                            "function": {"name": "add", "arguments": {"a": 1}},
                        }
                    ],
                },
                {"role": "tool", "content": "Error: 3", "tool_call_id": "t", "name": "add"},
                {"role": "user", "content": "Well?"},
            ],
        ),
        ({"messages": [TURN]}, [TURN]),
        ({"messages": [TURN], "system": ""}, [TURN]),
        ({"messages": [TURN], "system": "S"}, [{"role": "system", "content": "S"}, TURN]),
        (  # images and texts keep their order, in results and where two messages become one
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "user", "content": [IMAGE, {"type": "text", "text": "b"}, IMAGE]},
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "is_error": True,
                                "content": [IMAGE],
                            },
                            {"type": "text", "text": "c"},
                        ],
                    },
                    {"role": "user", "content": "d"},
                ]
            },
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image"},
                        {"type": "text", "text": "b"},
                        {"type": "image"},
                    ],
                },
                {
                    "role": "tool",
                    "content": [{"type": "text", "text": "Error: "}, {"type": "image"}],
                    "tool_call_id": "t",
                },
                {"role": "user", "content": "c\nd"},
            ],
        ),
        (  # documents are text in their place, with their title and context
            {
                "messages": [
                    {"role": "user", "content": [DOCUMENT, {"type": "text", "text": "So?"}]},
                    {"role": "assistant", "content": "d"},
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "document",
                                "source": {
                                    "type": "content",
                                    "content": [{"type": "text", "text": "a"}, IMAGE],
                                },
                            },
                        ],
                    },
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "t",
                                "content": [
                                    {
                                        "type": "document",
                                        "source": {"type": "content", "content": "b"},
                                    }
                                ],
                            }
                        ],
                    },
                ]
            },
            [
                {"role": "user", "content": "Log\nof today\nAll is well.\nSo?"},
                {"role": "assistant", "content": "d"},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "a"},
                        {"type": "image"},
                        {"type": "text", "text": "\n"},
                    ],
                },
                {"role": "tool", "content": "b\n", "tool_call_id": "t"},
            ],
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
                    {"role": "user", "content": "c"},
                    {"role": "assistant", "content": "d"},
                    {"role": "user", "content": "e"},
                ]
            },
            [
                {"role": "user", "content": "ab\nc"},
                {"role": "assistant", "content": "d"},
                {"role": "user", "content": "e"},
            ],
        ),
    ],
)
async def test_what_the_template_gets_to_see(body, expected):
    images = ImageParts(ImageConfig(image_urls=True), "")
    assert template_messages(msgspec.convert(body, CountTokensRequest), images) == expected


NOT_RENDERED = [
    ([], "messages must not be empty"),
    (
        [{"role": "user", "content": [{"type": "image"}]}],
        "messages[0].content[0].source is missing",
    ),
    (
        [{"role": "user", "content": [{"type": "tool_use", "id": "t"}]}],
        "messages[0].content[0]: blocks of type 'tool_use'",
    ),
    ([{"role": "user", "content": [{"type": "tool_result"}]}], "content[0].tool_use_id is"),
    (
        [TURN, {"role": "assistant", "content": CALLING}],
        "messages[1].content: the last message",
    ),
    (
        [
            TURN,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "a"}]},
            TURN,
        ],
        "messages[1].content[0].input is missing",
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "x", "title": "y"}]}],
        "messages[0].content[0].title is not supported",
    ),
    (
        [{"role": "user", "content": [{"type": "document"}]}],
        "messages[0].content[0].source is missing",
    ),
    (
        [{"role": "user", "content": [{**DOCUMENT, "source": PDF}]}],
        "messages[0].content[0].source: sources of type 'base64' are not supported here, only "
        "'text' and 'content'",
    ),
    (
        [
            {
                "role": "user",
                "content": [{**DOCUMENT, "source": {**DOCUMENT["source"], "media_type": "x"}}],
            }
        ],
        "messages[0].content[0].source.media_type must be 'text/plain', got 'x'",
    ),
    (
        [{"role": "assistant", "content": [DOCUMENT]}, TURN],
        "blocks of type 'document' are not supported here",
    ),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"typ": "text"}]}], "did you mean 'type'"),
    ([{"role": "tool", "content": "x"}], "messages[0].role"),
    ([{"role": "system", "content": [{"type": "image"}]}], "blocks of type 'image'"),
]


async def test_messages_that_cannot_be_rendered_are_refused_with_their_place(server):
    for messages, where in NOT_RENDERED:
        for path in ["/v1/messages", "/v1/messages/count_tokens"]:
            body = {"messages": messages} if "count" in path else {**BODY, "messages": messages}
            answer = await server.request("POST", path, json=body)
            assert answer.status == 400, (path, messages)
            assert where in answer.json()["error"]["message"]


async def test_a_client_calls_tools_and_answers_them(tmp_path):
    async with saying(TWO_CALLS, tmp_path, HERMES) as server, client_of(server.url) as client:
        ask = {"model": "embedded", "messages": [TURN], "max_tokens": 500, "tools": TOOLS}
        whole = await client.messages.create(**ask)
        assert whole.stop_reason == "tool_use"
        text, *calls = whole.content
        assert text.text == "Let me see."
        told = [("add", {"a": 1}), ("sub", {"ä": [2, "</tool_call>"]})]
        assert [(call.name, call.input) for call in calls] == told
        assert len({call.id for call in calls}) == 2
        async with client.messages.stream(**ask) as stream:
            streamed = await stream.get_final_message()
        assert streamed.stop_reason == "tool_use"
        assert streamed.content[0].text == text.text
        assert [(call.name, call.input) for call in streamed.content[1:]] == told

        results = [{"type": "tool_result", "tool_use_id": call.id} for call in calls]
        more = [
            {"role": "assistant", "content": [b.model_dump(mode="json") for b in whole.content]},
            {"role": "user", "content": results},
        ]
        answered = await client.messages.create(**{**ask, "messages": [TURN, *more]})
        assert answered.usage.input_tokens > 0

        choice = {"type": "auto", "disable_parallel_tool_use": True}
        one = await client.messages.create(**ask, tool_choice=choice)
        assert [block.type for block in one.content] == ["text", "tool_use"]
        none = await client.messages.create(**ask, tool_choice={"type": "none"})
        assert [block.text for block in none.content] == [TWO_CALLS]
        cut = await client.messages.create(**{**ask, "max_tokens": 20})
        assert cut.stop_reason == "max_tokens"


async def test_a_strict_tool_is_strict_here_too():
    body = {"messages": [TURN], "tools": [{**TOOLS[0], "strict": True}, TOOLS[1]]}
    use = tools_of(msgspec.convert(body, CountTokensRequest))
    assert [function.is_strict for function in use.functions] == [True, False]
    assert (use.is_bound, use.must_call, use.is_parallel) == (True, False, True)


async def test_a_reply_goes_on_with_an_assistants_last_message(server):
    turns = [TURN, {"role": "assistant", "content": "I am thy father's"}]
    counted = await server.request("POST", "/v1/messages/count_tokens", json={"messages": turns})
    body = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    expected = (await server.chat(**body, max_tokens=1)).json()["usage"]["prompt_tokens"]
    assert counted.json() == {"input_tokens": expected}
    usage = (await ask(server, messages=turns)).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_told_and_signed_for_clients_that_ask_for_it(tmp_path, stream):
    async with saying("I wonder.</think>So be it.", tmp_path, THINKING) as server:

        async def blocks(**fields):
            answer = await ask(server, max_tokens=99, **fields, stream=stream)
            if not stream:
                told = answer.json()["content"]
                assert all(block.get("signature") for block in told if block["type"] == "thinking")
                return [(block["type"], block.get("thinking", block.get("text"))) for block in told]
            found, signed = [], []
            for name, data in answer.named_events():
                if name == "content_block_start":
                    found.append((data["content_block"]["type"], ""))
                elif name == "content_block_delta":
                    assert data["index"] == len(found) - 1
                    kind, text = found[-1]
                    found[-1] = (kind, text + data["delta"].get(kind, ""))
                    if data["delta"]["type"] == "signature_delta":
                        signed.append(data["index"])
            assert signed == [i for i, (kind, _) in enumerate(found) if kind == "thinking"]
            return found

        said = [("text", "So be it.")]
        assert await blocks() == said
        assert await blocks(thinking={"type": "disabled"}) == said
        assert await blocks(thinking={"type": "adaptive"}) == [("thinking", "I wonder."), *said]


async def test_tools_that_cannot_be_called_are_refused_with_their_place(tmp_path):
    tool = TOOLS[0]
    async with saying("Hello", tmp_path, HERMES) as server:
        for change, where in (
            ({"tools": [{**tool, "type": "bush_20250124"}]}, "no tools of type 'bush_2"),
            ({"tools": [tool, tool]}, "tools[1].name: there are two"),
            ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: the name of a tool"),
            ({"tools": [{"name": "a"}]}, "tools[0].input_schema is missing"),
            ({"tools": [{**tool, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
            ({"tools": [{**tool, "input_schema": {"type": 5}}]}, "tools[0].input_schema"),
            ({"tools": [{**tool, "strct": True}]}, "in tools[0]: did you mean 'strict'"),
            ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice has a name"),
            ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
            ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is missing"),
            ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "must be at least 1"),
            ({"stop": "x", "stop_sequences": ["y"]}, "not both"),
            ({"thread": {"type": "create"}}, "thread is not supported"),
            ({"output_config": {"format": {"type": "json"}}}, "output_config.format.type"),
            ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
            ({"output_config": {"effort": "hihg"}}, "output_config.effort"),
            ({"output_config": FORM, "messages": [TURN, CALLED]}, "for a whole reply"),
        ):
            answer = await ask(server, **change)
            assert answer.status == 400, change
            assert where in check(answer)["message"], change
        good = {**BODY, "tools": TOOLS[:1], "tool_choice": {"type": "auto"}, "output_config": {}}
        good["messages"] = [TURN, {"role": "assistant", "content": CALLING}]
        good["messages"] += [{"role": "user", "content": ANSWERS["content"][:1]}]
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            if "count" in path:
                del good["max_tokens"], good["temperature"]
            # The second route reads the same fields. One in five would be of few kinds: whatever is
            # wrong comes after each multiple of five.
            for body in [*mutations(good)][:: 7 if "count" in path else 3]:
                answer = await server.request("POST", path, data=json.dumps(body).encode())
                assert answer.status in (200, 400, 404), body
                if answer.status != 200:
                    check(answer, answer.status)
            assert (await server.request("POST", path, json=good)).status == 200
    async with running() as server:
        assert "not supported with this model" in check(await ask(server, tools=TOOLS))["message"]


class Hair(pydantic.BaseModel):
    """What is asked for."""

    is_red: bool


async def test_a_call_that_is_forced_and_a_text_that_has_a_form_fit_their_schemas():
    config = EngineConfig(
        runner=RunnerConfig(threads=1),
        server=ServerConfig(tool_call_parser="hermes", reasoning_parser="none"),
    )
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    tools = [{"name": name, "input_schema": schema} for name in ("paint", "sell")]
    async with running(config) as server, client_of(server.url) as client:
        asked = {**ASKED, "max_tokens": 3000, "tools": tools}
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, TO_SELL):
            async with client.messages.stream(**asked, tool_choice=choice) as stream:
                streamed = await stream.get_final_message()
            whole = await client.messages.create(**asked, tool_choice=choice)
            for message in (whole, streamed):
                [call] = message.content
                assert message.stop_reason == "tool_use"
                assert call.name == "sell" or choice is not TO_SELL
                assert call.input["colour"] in ("red", "blue")
        formed = {"type": "json_schema", "schema": schema}
        plain = {**ASKED, "max_tokens": 3000, "output_config": {"format": formed}}
        whole = await client.messages.create(**plain)
        assert json.loads(whole.content[0].text)["colour"] in ("red", "blue")
        parsed = await client.messages.parse(**{**ASKED, "max_tokens": 3000}, output_format=Hair)
        assert type(parsed.parsed_output.is_red) is bool
        async with client.messages.stream(**asked, output_format=Hair) as stream:
            last = (await stream.get_final_message()).content[-1]
        assert last.type == "tool_use" or type(last.parsed_output.is_red) is bool
        bad = {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}}
        answer = await ask(server, output_config={"format": {**formed, "schema": bad}})
        assert check(answer)["message"].startswith("output_config.format.schema: ")
        for change in mutations({**FORM, "effort": None}):
            answer = await ask(server, output_config=change, max_tokens=1)
            assert answer.status == 200 or check(answer), change
        tools = [{"name": "x", "input_schema": bad}]
        answer = await ask(server, tools=tools, tool_choice={"type": "any"})
        assert check(answer)["message"].startswith("the tools cannot be compiled")


LONG = "The night is long that never finds the day. " * 8


def kept(ttl, text=LONG):
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": ttl}}]


async def filled(server):
    """Others use all of the cache."""
    for i in range(8):
        await server.complete([i + 3] * 300, max_tokens=1)


SMALL = {
    "model": {"max_model_len": 512},
    "cache": {"num_kv_blocks": 80, "block_size": 16},
    "scheduler": {"max_client_leased_share": 0.5},
}


@pytest.mark.parametrize(
    ("ttl", "name"), [("5m", "ephemeral_5m_input_tokens"), ("1h", "ephemeral_1h_input_tokens")]
)
async def test_a_ttl_keeps_the_prefix_while_others_fill_the_cache_and_usage_tells_of_it(
    start_server, ttl, name
):
    asked = {**ASKED, "system": kept(ttl)}
    async with start_server(**SMALL) as server, client_of(server.url) as client:
        usage = (await client.messages.create(**asked)).usage
        counted = await client.messages.count_tokens(
            model="embedded", messages=[TURN], system=kept(ttl)
        )
        created = counted.input_tokens // 16 * 16
        assert created >= 96
        assert usage.cache_creation_input_tokens == created
        assert getattr(usage.cache_creation, name) == created
        assert sum(usage.cache_creation.model_dump().values()) == created
        assert usage.input_tokens + created == counted.input_tokens
        await filled(server)
        async with client.messages.stream(**asked) as stream:
            final = (await stream.get_final_message()).usage
        assert (final.cache_read_input_tokens, final.cache_creation_input_tokens) == (created, 0)
        assert final.input_tokens + created == counted.input_tokens


async def test_without_a_ttl_nothing_is_kept(start_server):
    async with start_server(**SMALL) as server, client_of(server.url) as client:
        system = [{**kept("5m")[0], "cache_control": {"type": "ephemeral"}}]
        first = await client.messages.create(**ASKED, system=system)
        assert first.usage.cache_creation is None
        await filled(server)
        second = await client.messages.create(**ASKED, system=system)
        assert second.usage.cache_read_input_tokens == 0


@pytest.mark.parametrize("ttl", ["61m", "2h", "0s", "5", "five minutes", 300, "-5m"])
async def test_a_ttl_that_is_no_time_of_up_to_an_hour_is_refused_with_its_place(start_server, ttl):
    import anthropic

    parser = {"tool_call_parser": "hermes"}
    async with start_server(server=parser) as server, client_of(server.url) as client:
        control = kept(ttl)[0]["cache_control"]
        result = {"type": "tool_result", "tool_use_id": "t", "content": kept(ttl)}
        for change, place in (
            ({"system": kept(ttl)}, r"system\[0\].cache_control.ttl"),
            ({"tools": [TOOLS[0], TOOLS[1] | {"cache_control": control}]}, r"tools\[1\]"),
            ({"messages": [{"role": "user", "content": kept(ttl)}]}, r"messages\[0\].content\[0\]"),
            ({"extra_body": {"cache_control": control}}, "cache_control.ttl must"),
            (
                {
                    "tools": TOOLS,
                    "messages": [
                        TURN,
                        {"role": "assistant", "content": CALLING},
                        {"role": "user", "content": [result]},
                    ],
                },
                r"messages\[2\].content\[0\].content\[0\].cache_control.ttl",
            ),
        ):
            with pytest.raises(anthropic.BadRequestError, match=place):
                await client.messages.create(**{**ASKED, **change})


async def test_a_key_that_may_not_state_it_keeps_nothing_and_is_told_so(start_server, tmp_path):
    import anthropic

    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "keys:\n  - {name: ann, key: ann-key-of-some-length, hints: [session]}\n"
        "  - {name: ben, key: ben-key-of-some-length}\n"
    )
    async with start_server(access={"api_keys_file": str(keys)}) as server:
        for name, is_kept in (("ann", False), ("ben", True)):
            key = f"{name}-key-of-some-length"
            async with anthropic.AsyncAnthropic(base_url=server.url, api_key=key) as client:
                reply = await client.messages.create(**ASKED, system=kept("5m", f"{name} {LONG}"))
            assert (reply.usage.cache_creation_input_tokens > 0) == is_kept


async def test_a_ttl_of_chat_completions_keeps_the_prefix_too(start_server):
    async with start_server(**SMALL) as server:
        body = {"messages": [{"role": "user", "content": kept("90s")}], "max_tokens": 2}
        first = await server.request("POST", "/v1/chat/completions", json=body)
        await filled(server)
        second = await server.request("POST", "/v1/chat/completions", json=body)
        num_prompt = first.json()["usage"]["prompt_tokens"]
        cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == num_prompt // 16 * 16
        bad = {**body, "cache_control": {"ttl": "2h"}}
        refused = await server.request("POST", "/v1/chat/completions", json=bad)
        assert refused.status == 400
        assert refused.json()["error"]["param"] == "cache_control.ttl"
