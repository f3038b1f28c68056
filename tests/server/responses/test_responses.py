"""OpenAI's Responses API: by the `openai` package, and what that does not show."""

import asyncio
import json

import msgspec
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent

from aioserve.apis.responses.prompt import template_turns, tools_of
from aioserve.apis.responses.protocol import InputItem, ResponsesRequest
from aioserve.config import EngineConfig, ImageConfig, RunnerConfig, ServerConfig
from aioserve.errors import RequestError
from aioserve.server.images import ImageParts
from aioserve.server.running import Kept, ResponseStore
from tests.server.bad_bodies import check, mutations, thinned
from tests.server.raw_client import fail_what_runs
from tests.server.scripted import HERMES, TWO_CALLS, saying
from tests.server.serving import running

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

ASKED = {"model": "embedded", "input": "Who's there?", "max_output_tokens": 12, "temperature": 0}

NO_IMAGES = ImageParts(ImageConfig(), "none here")


EVENT = pydantic.TypeAdapter(ResponseStreamEvent)


async def ask_for(server, **fields):
    return await server.request("POST", "/v1/responses", json={**ASKED, **fields})


def use_sync_client(url):
    """Runs in a thread: the loop serves meanwhile."""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        first = client.responses.create(**ASKED)
        with client.responses.create(**ASKED, stream=True) as stream:
            text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert text == first.output_text
        second = client.responses.create(**ASKED, previous_response_id=first.id)
        said = [{"role": "user", "content": ASKED["input"]}, *first.output]
        said = [turn if isinstance(turn, dict) else turn.model_dump() for turn in said]
        again = client.responses.create(
            **{**ASKED, "input": [*said, {"role": "user", "content": ASKED["input"]}]}
        )
        assert again.output_text == second.output_text
        assert again.usage.input_tokens == second.usage.input_tokens > first.usage.input_tokens


async def test_a_conversation_goes_on_by_its_id_or_by_what_was_said():
    async with running(EngineConfig(runner=RunnerConfig(threads=1))) as server:
        await asyncio.to_thread(use_sync_client, server.url + "/v1")


async def test_instructions_are_not_remembered_and_store_false_remembers_nothing(server):
    first = (await ask_for(server, instructions="Be brief. " * 9)).json()
    second = (await ask_for(server, previous_response_id=first["id"])).json()
    asked = {"role": "user", "content": ASKED["input"]}
    said = {"role": "assistant", "content": first["output"][0]["content"][0]["text"]}
    body = {"messages": [asked, said, asked]}
    expected = (await server.request("POST", "/tokenize", json=body)).json()["count"]
    assert second["usage"]["input_tokens"] == expected
    unstored = (await ask_for(server, store=False)).json()
    answer = await ask_for(server, previous_response_id=unstored["id"])
    assert check(answer)["param"] == "previous_response_id"


async def test_the_store_forgets_what_was_not_asked_for_the_longest():
    def of(length):
        return Kept(b"x" * (length - 5), b"x" * 5)

    store = ResponseStore(max_responses=2, max_bytes=100)
    await store.put("a", of(10))
    await store.put("b", of(10))
    assert await store.get("a")
    await store.put("c", of(10))
    assert [await store.get(i) is not None for i in "abc"] == [True, False, True]
    await store.put("d", of(95))
    assert [await store.get(i) is not None for i in "acd"] == [False, False, True]
    assert [await store.forget("d"), await store.forget("d")] == [True, False]
    await store.put("e", of(100))
    assert await store.get("e")
    await store.put("f", of(101))
    assert await store.get("e") is await store.get("f") is None


async def test_a_stream_that_fails_ends_with_openais_error(start_server, monkeypatch):
    async with start_server(runner={"step_base_ms": 5}) as server:
        answering = asyncio.create_task(ask_for(server, max_output_tokens=4000, stream=True))
        await fail_what_runs(server, monkeypatch)
        events = [data for _, data in (await answering).named_events()]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        EVENT.validate_python(events[-1])
        assert (events[-1]["type"], events[-1]["message"]) == ("error", "internal server error")


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_is_incomplete_is_told(start_server, stream):
    async def status(**fields):
        answer = await ask_for(server, **fields, stream=stream)
        told = answer.json() if not stream else json.loads(answer.body.split(b"data: ")[-1])
        response = told["response"] if stream else told
        return response["status"], response["incomplete_details"]

    async with start_server(runner={"simulated_output_tokens": 9}) as server:
        assert await status(max_output_tokens=99) == ("completed", None)
        assert await status(max_output_tokens=3) == ("incomplete", {"reason": "max_output_tokens"})
        assert await status(timeout=1e-9) == ("incomplete", {"reason": "timeout"})


NOT_SERVED = [
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "content": [{"type": "x"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"content": "x"}]}, "input[0].role"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].image_url",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text", "file_id": "x"}]}]},
        "input[0].content[0].file_id",
    ),
    ({"input": "word " * 20_000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"previous_response_id": "x"}, "previous_response_id"),
    ({"tools": [{"type": "web_serch"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a", "strct": True}]}, "tools[0].strct"),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
    (
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]},
        "tools[0].tools[0].name",
    ),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "a"}]}, "tools"),  # of this model
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
        "text.format.schema",
    ),
    ({"reasoning": {"effort": "hihg"}}, "reasoning.effort"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"guided_json": {}}, "guided_json"),
    ({"top_k": -5}, "top_k"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"background": True}, "background"),
    ({"metadata": {"a": 5}}, "metadata[...]"),
    ({"imput": "x"}, "imput"),
]


async def test_what_is_not_served_is_refused_with_its_place(server):
    for change, param in NOT_SERVED:
        assert check(await ask_for(server, **change))["param"] == param, str(change)[:80]


TOOLS = [
    {
        "type": "function",
        "name": name,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        "strict": False,
    }
    for name in ("add", "sub")
]
ONE_CALL = TWO_CALLS.removeprefix("Let me see.\n").partition('\n<tool_call>\n{"name": "sub')[0]
SAY_AND_CALL = f"<think>Hm.</think>Well.{ONE_CALL}And so."


def text_of(item):
    """The part that holds what it says; of a call, the call."""
    [part] = item.get("content") or item.get("summary") or [item]
    return part


def said(items):
    """What items say, without their ids."""
    kinds = {"message": "text", "reasoning": "text", "function_call": "arguments"}
    return [(item["type"], item["status"], text_of(item)[kinds[item["type"]]]) for item in items]


CASES = [
    ("Ay.", {}, ["message"]),
    ("", {}, ["message"]),
    ("<think>Hm.</think>Ay.", {}, ["reasoning", "message"]),
    ("<think>Hm.", {}, ["reasoning"]),
    (ONE_CALL, {"tools": TOOLS}, ["function_call"]),
    (TWO_CALLS, {"tools": TOOLS}, ["message", "function_call", "function_call"]),
    (SAY_AND_CALL, {"tools": TOOLS}, ["reasoning", "message", "function_call", "message"]),
    (TWO_CALLS, {"tools": TOOLS, "max_output_tokens": 30}, ["message", "function_call"]),
    (TWO_CALLS, {"tools": TOOLS, "parallel_tool_calls": False}, ["message", "function_call"]),
    (TWO_CALLS, {"tools": TOOLS, "tool_choice": "none"}, ["message"]),
]


async def test_whole_and_streamed_are_one_and_as_openais_models_have_them(tmp_path):
    async with saying("", tmp_path, HERMES, reasoning_parser="qwen3") as server:
        for text, fields, kinds in CASES:
            server.say(text)
            whole = (await ask_for(server, **{"max_output_tokens": 999, **fields})).json()
            assert [item["type"] for item in whole["output"]] == kinds
            body = {"max_output_tokens": 999, **fields, "stream": True}
            check_stream(await ask_for(server, **body), whole)


async def test_reasoning_is_told_as_a_summary_to_a_client_that_asks_for_one(tmp_path):
    ask = {"tools": TOOLS, "max_output_tokens": 999}
    async with saying(SAY_AND_CALL, tmp_path, HERMES, reasoning_parser="qwen3") as server:
        for reasoning, place, other in (
            ({"summary": "auto"}, "summary", "content"),
            ({"generate_summary": "auto"}, "summary", "content"),
            ({"summary": None, "generate_summary": None}, "content", "summary"),
        ):
            body = {**ask, "reasoning": reasoning}
            whole = (await ask_for(server, **body)).json()
            thought, *_, call, _ = whole["output"]
            assert [thought[place][0]["text"], thought[other]] == ["Hm.", []]
            check_stream(await ask_for(server, **body, stream=True), whole)
            answered = {"type": "function_call_output", "call_id": call["call_id"], "output": "3"}
            before = {"previous_response_id": whole["id"]}
            await ask_for(server, **ask, **before, input=[answered])
            assert "Hm." in server.prompts()[-1]


def check_stream(streamed, whole):
    """That a stream tells what is said as a whole, in the order and the shapes of OpenAI's."""
    Response.model_validate(whole)
    prefixes = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
    assert all(item["id"].startswith(prefixes[item["type"]]) for item in whole["output"])
    assert len({item["id"] for item in whole["output"]}) == len(whole["output"])
    events = [data for _, data in streamed.named_events()]
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert whole["id"].startswith("resp_")
    assert said(last["output"]) == said(whole["output"])
    assert last["status"] == whole["status"] == whole["output"][-1]["status"]
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    for index, item in enumerate(last["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added"
        assert own[-1] == {**own[-1], "type": "response.output_item.done", "item": item}
        deltas = "".join(event.get("delta", "") for event in own)
        assert deltas == said([item])[0][-1]
        [done] = [event for event in own if "text" in event or "arguments" in event]
        assert done.get("text", done.get("arguments")) == deltas
        parts = [i for i, event in enumerate(own) if "part" in event]
        assert parts == ([] if item["type"] == "function_call" else [1, len(own) - 2])


async def test_a_client_calls_functions_and_answers_them(tmp_path):
    async with (
        saying(TWO_CALLS, tmp_path, HERMES) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        turn = {"role": "user", "content": "What is 1 and 2?"}
        ask = {"model": "embedded", "tools": TOOLS}
        whole = await client.responses.create(**ask, input=[turn])
        assert whole.status == "completed"
        calls = [item for item in whole.output if item.type == "function_call"]
        told = [("add", '{"a": 1}'), ("sub", '{"ä": [2, "</tool_call>"]}')]
        assert [(call.name, call.arguments) for call in calls] == told
        async with client.responses.stream(**ask, input=[turn]) as stream:
            final = await stream.get_final_response()
        streamed = [item for item in final.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in streamed] == told
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
            for call in calls
        ]
        by_input = await client.responses.create(**ask, input=[turn, *whole.output, *outputs])
        by_id = await client.responses.create(**ask, input=outputs, previous_response_id=whole.id)
        assert by_id.usage.input_tokens == by_input.usage.input_tokens > whole.usage.input_tokens
        with pytest.raises(openai.BadRequestError, match="calls without output") as caught:
            await client.responses.create(**ask, input=outputs[:1], previous_response_id=whole.id)
        assert caught.value.param == "input"
        only = {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "x"}],
        }
        with pytest.raises(openai.BadRequestError, match=r"tool_choice\.tools is 'x'"):
            await client.responses.create(**ask, input="x", tool_choice=only)
        kept = await client.responses.retrieve(by_id.id)
        assert kept == by_id
        listed = [item async for item in client.responses.input_items.list(by_id.id, limit=2)]
        kinds = [item.type for item in reversed(listed)]
        assert kinds == [
            "message",
            "message",
            *["function_call"] * 2,
            *["function_call_output"] * 2,
        ]
        path = f"/v1/responses/{by_id.id}/input_items?order=asc"
        ResponseItemList.model_validate((await server.get(path)).json())
        assert check(await server.get(path + "&after=x"))["param"] == "after"
        assert check(await server.get(path + "&limit=0"))["param"] == "limit"
        stored = f"/v1/responses/{by_id.id}"
        for method, at in (("GET", path), ("GET", stored + "?"), ("DELETE", stored + "?")):
            assert check(await server.request(method, at + "&pages=2"))["param"] == "pages"
        await client.responses.delete(by_id.id)
        for call in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError, match="no response") as caught:
                await call(by_id.id)
            assert caught.value.code == "response_not_found"
        answer = await server.get(f"/v1/responses/{whole.id}?stream=true")
        assert check(answer)["param"] == "stream"
        encode = server.engine.model_info.tokenizer.encode
        limit = len(encode(TWO_CALLS[: TWO_CALLS.index("1}")]))
        cut = await client.responses.create(**ask, input=[turn], max_output_tokens=limit)
        assert (cut.output[-1].arguments, cut.output[-1].status) == ('{"a": ', "incomplete")
        # The model is shown the arguments as the text that they are.
        answered = [{**outputs[0], "call_id": cut.output[-1].call_id}]
        await client.responses.create(**ask, input=answered, previous_response_id=cut.id)
        assert '"{\\"a\\": "' in server.prompts()[-1]


class Hair(pydantic.BaseModel):
    """What is asked for."""

    model_config = pydantic.ConfigDict(extra="forbid")
    is_red: bool


async def test_what_is_parsed_fits_and_a_function_that_is_forced_is_called():
    config = EngineConfig(
        runner=RunnerConfig(threads=1), server=ServerConfig(tool_call_parser="hermes")
    )
    async with (
        running(config) as server,
        openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        ask = {"model": "embedded", "input": "What hair hath he?"}
        parsed = await client.responses.parse(**ask, text_format=Hair)
        assert type(parsed.output_parsed.is_red) is bool
        assert parsed.text.format.schema_ == Hair.model_json_schema()
        async with client.responses.stream(**ask, text_format=Hair) as stream:
            assert type((await stream.get_final_response()).output_parsed.is_red) is bool
        as_object = {"format": {"type": "json_object"}}
        told = await client.responses.create(**ask, text=as_object, max_output_tokens=200)
        assert told.output_text.startswith("{")
        tools = [openai.pydantic_function_tool(Hair)]
        tools = [{"type": "function", **tools[0]["function"]}]
        for choice in ("required", {"type": "function", "name": "Hair"}):
            forced = await client.responses.parse(**ask, tools=tools, tool_choice=choice)
            assert {item.name for item in forced.output} == {"Hair"}
            Hair.model_validate_json(forced.output[0].arguments)
        bad = [{**tools[0], "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}]
        answer = await ask_for(server, tools=bad, tool_choice="required")
        assert check(answer)["param"] == "tools[0].parameters.properties.a.not"


def items(*given):
    return [msgspec.convert(item, InputItem) for item in given]


USER = {"role": "user", "content": "Hi"}
THOUGHT = {
    "type": "reasoning",
    "id": "r",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
SAID = {"role": "assistant", "content": [{"type": "output_text", "text": "Ay."}]}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'}
OTHER = {**CALL, "call_id": "d", "arguments": ""}
OUTPUT = {
    "type": "function_call_output",
    "call_id": "c",
    "output": [{"type": "input_text", "text": "3"}],
}


async def test_what_one_response_thought_said_and_called_is_one_message():
    def call(call_id, arguments):
        function = {"name": "add", "arguments": arguments}
        return {"id": call_id, "type": "function", "function": function}

    def own(content, **fields):
        return {"role": "assistant", "content": content, **fields}

    told = {"role": "tool", "content": "3", "tool_call_id": "c", "name": "add"}
    last = {**told, "tool_call_id": "d"}
    calls = [call("c", {"a": 1}), call("d", {})]
    ends = {**OUTPUT, "call_id": "d"}
    for given, expected in (
        ([USER, SAID, SAID], [USER, own("Ay."), own("Ay.")]),
        (
            [USER, THOUGHT, SAID, CALL, OTHER, OUTPUT, ends],
            [USER, own("Ay.", reasoning_content="Hm.", tool_calls=calls), told, last],
        ),
        (
            [SUMMARY, CALL, OUTPUT, THOUGHT, SAID],
            [
                own("", reasoning_content="Hm.", tool_calls=calls[:1]),
                told,
                own("Ay.", reasoning_content="Hm."),
            ],
        ),
        ([{"role": "developer", "content": "Be"}], [{"role": "system", "content": "Be"}]),
    ):
        assert template_turns(items(*given), NO_IMAGES) == expected
    # An earlier response has ended, whatever follows.
    assert template_turns(items(USER, SAID, CALL, OUTPUT), NO_IMAGES, 2)[1:3] == [
        own("Ay."),
        own("", tool_calls=calls[:1]),
    ]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([USER, OUTPUT], "input[1].call_id"),
        ([OUTPUT, CALL], "input[0].call_id"),
        ([CALL, CALL], "input[1].call_id"),
        ([CALL, OUTPUT, OUTPUT], "input[2].call_id"),
        ([USER, CALL], "input"),
        ([{**CALL, "output": "x"}], "input[0].output"),
        ([{**CALL, "name": None}], "input[0].name"),
    ],
)
async def test_calls_and_outputs_that_do_not_fit_are_refused_with_their_place(given, param):
    with pytest.raises(RequestError) as caught:
        template_turns(items(*given), NO_IMAGES)
    assert caught.value.param == param


async def test_tools_are_offered_as_they_are_asked_for():
    def use(**fields):
        given = {"input": "x", "tools": [{**TOOLS[0], "strict": True}, TOOLS[1]], **fields}
        use = tools_of(msgspec.convert(given, ResponsesRequest)).use
        return use and (
            tuple(f.name for f in use.functions),
            use.must_call,
            use.is_parallel,
            use.is_bound,
        )

    allowed = {"type": "allowed_tools", "tools": [{"type": "function", "name": "sub"}]}
    both = ("add", "sub")
    assert use() == use(tool_choice="auto") == (both, False, True, True)
    assert use(tools=TOOLS) == (both, False, True, False)
    assert use(tool_choice="none") is None
    assert use(tool_choice="required", parallel_tool_calls=False) == (both, True, False, True)
    assert use(tool_choice={**allowed, "mode": "auto"}) == (("sub",), False, True, True)
    assert use(tool_choice={**allowed, "mode": "required"}) == (("sub",), True, True, True)
    assert use(tool_choice={"type": "function", "name": "add"}) == (("add",), True, False, True)


async def test_nothing_in_a_body_with_tools_is_a_failure_of_the_server():
    good = {
        "input": [USER, THOUGHT, SAID, CALL, OUTPUT],
        "tools": TOOLS[:1],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "add"}],
        },
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "reasoning": {"effort": "none"},
        "max_output_tokens": 1,
    }
    config = EngineConfig(
        runner=RunnerConfig(threads=1), server=ServerConfig(tool_call_parser="hermes")
    )
    bodies, num_refused = thinned(mutations(good)), 0
    async with running(config) as server:
        for body in bodies:
            answer = await server.request("POST", "/v1/responses", data=json.dumps(body).encode())
            assert answer.status in (200, 400, 404), body
            if answer.status != 200:
                check(answer, answer.status)
                num_refused += 1
        assert (await server.request("POST", "/v1/responses", json=good)).status == 200
        assert set((await server.gauges()).values()) == {0}
    assert num_refused > len(bodies) // 2
