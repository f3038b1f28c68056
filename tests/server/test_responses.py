"""OpenAI's Responses API: by the `openai` package, and what that does not show."""

import asyncio
import json

import openai
import pytest
from serving import SIMULATED, running
from test_bad_input import check

from aioserve.config import EngineConfig, RunnerConfig
from aioserve.server.responses.store import ResponseStore

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

ASKED = {"model": "embedded", "input": "Who's there?", "max_output_tokens": 12, "temperature": 0}


@pytest.fixture(params=["simulated", "model"])
async def url(request):
    model = EngineConfig(runner=RunnerConfig(threads=1))
    async with running(SIMULATED if request.param == "simulated" else model) as server:
        yield server.url + "/v1"


async def ask(server, **fields):
    return await server.request("POST", "/v1/responses", json={**ASKED, **fields})


async def test_whole_and_streamed_agree_event_by_event(url):
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        whole = await client.responses.create(**ASKED, instructions="Be brief.")
        events = [
            event
            async for event in await client.responses.create(
                **ASKED, instructions="Be brief.", stream=True
            )
        ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    *_, text_done, part_done, item_done, last = events
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert "".join(event.delta for event in deltas) == whole.output_text
    assert text_done.text == part_done.part.text == item_done.item.content[0].text
    assert last.response.output_text == whole.output_text
    assert last.response.status == whole.status
    assert last.response.usage.total_tokens == whole.usage.total_tokens
    assert {event.item_id for event in deltas} <= {item_done.item.id}


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


async def test_a_conversation_goes_on_by_its_id_or_by_what_was_said(url):
    await asyncio.to_thread(use_sync_client, url)


async def test_instructions_are_not_remembered_and_store_false_remembers_nothing(server):
    first = (await ask(server, instructions="Be brief. " * 9)).json()
    second = (await ask(server, previous_response_id=first["id"])).json()
    asked = {"role": "user", "content": ASKED["input"]}
    said = {"role": "assistant", "content": first["output"][0]["content"][0]["text"]}
    body = {"messages": [asked, said, asked]}
    expected = (await server.request("POST", "/tokenize", json=body)).json()["count"]
    assert second["usage"]["input_tokens"] == expected
    unstored = (await ask(server, store=False)).json()
    answer = await ask(server, previous_response_id=unstored["id"])
    assert check(answer)["param"] == "previous_response_id"


async def test_the_store_forgets_what_was_not_asked_for_the_longest():
    def turns(length):
        return [{"role": "user", "content": "x" * length}]

    store = ResponseStore(max_responses=2, max_characters=100)
    store.put("a", turns(10))
    store.put("b", turns(10))
    assert store.get("a")
    store.put("c", turns(10))
    assert [store.get(i) is not None for i in "abc"] == [True, False, True]
    store.put("d", turns(95))
    assert [store.get(i) is not None for i in "acd"] == [False, False, True]
    store.put("e", turns(101))
    assert store.get("d") is store.get("e") is None


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_is_incomplete_is_told(start_server, stream):
    async def status(**fields):
        answer = await ask(server, **fields, stream=stream)
        told = answer.json() if not stream else json.loads(answer.body.split(b"data: ")[-1])
        response = told["response"] if stream else told
        return response["status"], response["incomplete_details"]

    async with start_server(runner={"simulated_output_tokens": 9}) as server:
        assert await status(max_output_tokens=99) == ("completed", None)
        assert await status(max_output_tokens=3) == ("incomplete", {"reason": "max_output_tokens"})
        assert await status(timeout=1e-9) == ("incomplete", {"reason": "timeout"})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output"}]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "file_id": "x"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": "word " * 20_000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"metadata": {"a": 5}}, "metadata[...]"),
        ({"imput": "x"}, "imput"),
    ],
)
async def test_what_is_not_served_is_refused_with_its_place(server, change, param):
    assert check(await ask(server, **change))["param"] == param
