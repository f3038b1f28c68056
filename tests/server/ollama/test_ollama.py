"""Ollama's API against a running server: lines, whole replies, calls, thinking, errors, models."""

import asyncio
import json

import msgspec
import pytest

from aioserve.apis.ollama import OllamaMessage, Options, chat_messages
from aioserve.errors import RequestError
from tests.server.raw_client import fail_what_runs
from tests.server.scripted import HERMES, THINKING, TWO_CALLS, saying
from tests.server.serving import SIMULATED, running

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

ASK = {"model": "embedded", "messages": [{"role": "user", "content": "Speak, I charge thee!"}]}
SHORT = {"options": {"num_predict": 8, "temperature": 0, "num_ctx": 4096}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "does it",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    for name in ("add", "sub")
]


async def ask(server, path="/api/chat", **fields):
    answer = await server.request("POST", path, json={**ASK, **SHORT, **fields})
    assert answer.status == 200, answer.body
    return answer


def lines(answer):
    assert answer.headers["Content-Type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.splitlines()]


@pytest.fixture
async def server():
    async with running(SIMULATED) as server:
        yield server


@pytest.fixture
async def calling(tmp_path):
    async with saying(TWO_CALLS, tmp_path, HERMES) as server:
        yield server


@pytest.fixture
async def thinking(tmp_path):
    async with saying("Let me see.</think>It is four.", tmp_path, THINKING) as server:
        yield server


async def test_a_reply_is_streamed_as_lines_unless_it_is_wanted_whole(server):
    *pieces, last = lines(await ask(server))
    whole = (await ask(server, stream=False)).json()
    assert "".join(piece["message"]["content"] for piece in pieces) == whole["message"]["content"]
    assert {piece["done"] for piece in pieces} == {False}
    for end in (last, whole):
        assert (end["done"], end["done_reason"], end["eval_count"]) == (True, "length", 8)
        assert end["prompt_eval_count"] > 0
        assert end["total_duration"] >= end["prompt_eval_duration"] > 0
    assert last["message"] == {"role": "assistant", "content": ""}


async def test_it_says_what_chat_completions_say(server):
    body = {**ASK, "max_tokens": 8, "temperature": 0}
    chat = (await server.request("POST", "/v1/chat/completions", json=body)).json()
    whole = (await ask(server, stream=False)).json()
    assert whole["message"]["content"] == chat["choices"][0]["message"]["content"]
    assert whole["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
    asked = {"prompt": ASK["messages"][0]["content"], "stream": False, **SHORT}
    told = await server.request("POST", "/api/generate", json={"model": "embedded", **asked})
    assert told.json()["response"] == whole["message"]["content"]


async def test_a_raw_prompt_is_continued_without_the_template(server):
    fields = {"prompt": "Speak", "raw": True, "stream": False, **SHORT}
    told = await server.request("POST", "/api/generate", json={"model": "embedded", **fields})
    plain = {"prompt": "Speak", "max_tokens": 8, "temperature": 0}
    other = await server.request("POST", "/v1/completions", json=plain)
    assert told.json()["response"] == other.json()["choices"][0]["text"]


@pytest.mark.parametrize("stream", [True, False])
async def test_calls_come_whole_with_arguments_that_are_objects(calling, stream):
    options = {"num_predict": 200}
    answer = await ask(calling, tools=TOOLS, stream=stream, options=options)
    told = lines(answer) if stream else [answer.json()]
    calls = [call for line in told for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "add", "arguments": {"a": 1}},
        {"index": 1, "name": "sub", "arguments": {"ä": [2, "</tool_call>"]}},
    ]
    assert "".join(line["message"]["content"] for line in told).strip() == "Let me see."


async def test_results_of_tools_answer_the_calls_of_their_names():
    called = [{"function": {"name": n, "arguments": {"a": 1}}} for n in ("add", "sub", "add")]
    said = [
        {"role": "assistant", "tool_calls": called},
        {"role": "tool", "tool_name": "sub", "content": "2"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "name": "add", "content": "4"},
    ]
    first, *results = chat_messages(msgspec.convert(said, list[OllamaMessage]))
    ids = [call.id for call in first.tool_calls]
    assert len({*ids}) == 3
    assert [result.tool_call_id for result in results] == [ids[1], ids[0], ids[2]]
    assert [result.name for result in results] == ["sub", "add", "add"]
    said[1]["tool_name"] = "mul"
    with pytest.raises(RequestError, match=r"messages\[1\] answers no call: .* 'mul'"):
        chat_messages(msgspec.convert(said, list[OllamaMessage]))


async def test_thinking_comes_apart_unless_it_is_not_wanted(thinking):
    options = {"num_predict": 200}
    *pieces, _ = lines(await ask(thinking, options=options, think=True))
    assert (
        "".join(piece["message"].get("thinking", "") for piece in pieces).strip() == "Let me see."
    )
    whole = (await ask(thinking, options=options, stream=False)).json()["message"]
    assert (whole["thinking"].strip(), whole["content"].strip()) == ("Let me see.", "It is four.")
    without = (await ask(thinking, options=options, stream=False, think=False)).json()["message"]
    assert without == {"role": "assistant", "content": whole["content"]}


async def test_errors_are_a_sentence_that_names_the_field_in_ollamas_words(server):
    for fields, status, what in (
        ({"model": "other"}, 404, "'other'"),
        ({"options": {"temperature": 9}}, 400, "options.temperature: "),
        ({"options": {"num_predict": -5}}, 400, "options.num_predict: "),
        ({"options": {"mirostat": 2}}, 400, "options.mirostat is not supported"),
        ({"options": {"tfs_z": 0.5}}, 400, "options.tfs_z is not supported"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, 400, "must be -1 or absent"),
        ({"options": {"temprature": 1}}, 400, "did you mean 'temperature'"),
        ({"logprobs": True}, 400, "logprobs is not supported"),
        ({"messages": [{"role": "user", "contents": "x"}]}, 400, "messages[0].contents"),
        ({"format": {"type": "nothing"}}, 400, "format"),
    ):
        answer = await server.request("POST", "/api/chat", json={**ASK, **fields})
        assert answer.status == status, answer.body
        assert [*answer.json()] == ["error"]
        assert what in answer.json()["error"]


async def test_a_stream_that_fails_ends_with_the_error_as_a_line(server, monkeypatch):
    body = {**ASK, "options": {"num_predict": 1500}}
    asked = asyncio.create_task(server.request("POST", "/api/chat", json=body))
    await fail_what_runs(server, monkeypatch)
    *pieces, last = lines(await asked)
    assert "message" in pieces[0]
    assert last == {"error": "internal server error"}


async def test_models_are_told_by_their_names_without_invented_digests(server):
    [tag] = (await server.request("GET", "/api/tags")).json()["models"]
    assert (tag["name"], tag["model"], tag["details"]["family"]) == ("embedded",) * 2 + ("llama",)
    assert tag["size"] > 1_000_000
    assert "digest" not in tag
    [running_one] = (await server.request("GET", "/api/ps")).json()["models"]
    assert running_one["context_length"] == server.engine.max_model_len
    shown = (await server.request("POST", "/api/show", json={"model": "embedded:latest"})).json()
    assert "completion" in shown["capabilities"]
    assert shown["model_info"]["llama.context_length"] == server.engine.max_model_len
    assert "messages" in shown["template"]
    assert (await server.request("GET", "/api/version")).json()["version"].count(".") == 2


async def test_a_name_with_the_tag_that_ollama_appends_is_the_same_model(server):
    whole = (await ask(server, model="embedded:latest", stream=False)).json()
    assert whole["model"] == "embedded"


@pytest.mark.parametrize("name", ["embedded:latest", "anything:latest"])
async def test_where_every_name_is_served_the_tag_hides_no_name_that_is_known(name):
    model = msgspec.structs.replace(SIMULATED.model, served_model_name=("first", "embedded", "*"))
    async with running(msgspec.structs.replace(SIMULATED, model=model)) as server:
        told = (await ask(server, model=name, stream=False)).json()["model"]
        assert told == ("embedded" if name.startswith("embedded") else "first")


async def test_a_request_to_load_the_model_finds_it_loaded(server):
    for path, more in (("/api/chat", {"messages": []}), ("/api/generate", {})):
        body = {"model": "embedded", "keep_alive": "5m", **more}
        answer = (await server.request("POST", path, json=body)).json()
        assert (answer["done"], answer["done_reason"]) == (True, "load")


async def test_options_are_sampling_parameters_by_their_names_here():
    options = Options(num_predict=-1, repeat_penalty=1.2, stop=["a", "b"], top_k=4)
    given = options.as_chat()
    assert (given["max_tokens"], given["repetition_penalty"]) == (None, 1.2)
    assert (given["stop"], given["top_k"]) == (("a", "b"), 4)
