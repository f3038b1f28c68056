"""Anthropic's `anthropic` package against a running server, and what it does not show."""

import asyncio
import json

import anthropic
import msgspec
import pytest
from serving import SIMULATED, running

from aioserve.config import EngineConfig, RunnerConfig
from aioserve.server.anthropic_protocol import CountTokensRequest
from aioserve.server.messages import template_messages
from tests.processes import PATIENCE

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

TURN = {"role": "user", "content": "Speak, I charge thee, speak!"}
BODY = {"model": "embedded", "messages": [TURN], "max_tokens": 24, "temperature": 0}
# The package sends sampling parameters only as extra fields.
ASKED = {k: v for k, v in BODY.items() if k != "temperature"} | {"extra_body": {"temperature": 0}}
BLOCKS = {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]}


@pytest.fixture(params=["simulated", "model"])
async def url(request):
    model = EngineConfig(runner=RunnerConfig(threads=1))
    async with running(SIMULATED if request.param == "simulated" else model) as server:
        yield server.url


def client_of(url):
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)


async def test_whole_and_streamed_agree_and_the_tokens_are_counted(url):
    async with client_of(url) as client:
        whole = await client.messages.create(**ASKED, **BLOCKS)
        assert (whole.type, whole.role, whole.model) == ("message", "assistant", "embedded")
        assert whole._request_id == whole.id
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
    async with start_server(scheduler={"max_num_seqs": 1, "max_waiting_requests": 1}) as server:
        async with client_of(server.url) as client:
            bad, unknown = anthropic.BadRequestError, anthropic.NotFoundError
            for change, kind, cause, message in (
                ({"extra_body": {"temperature": -1}}, bad, "invalid_request_error", "temperature"),
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


def events_of(answer):
    """By name, with their data; asserts how they are framed."""
    *events, end = answer.body.decode().split("\n\n")
    assert end == ""
    for lines in events:
        name, _, data = lines.removeprefix("event: ").partition("\ndata: ")
        assert json.loads(data)["type"] == name
        yield name, json.loads(data)


async def ask(server, **fields):
    return await server.request("POST", "/v1/messages", json={**BODY, **fields})


@pytest.mark.parametrize("stream", [False, True])
async def test_why_it_stopped_is_told_in_anthropics_words(start_server, stream):
    async def stop(**fields):
        answer = await ask(server, **fields, stream=stream)
        told = dict(events_of(answer))["message_delta"]["delta"] if stream else answer.json()
        return told["stop_reason"], told["stop_sequence"]

    # the simulated model ends its reply by itself after so many tokens
    async with start_server(runner={"simulated_output_tokens": 9}) as server:
        assert await stop(max_tokens=20) == ("end_turn", None)
        assert await stop(max_tokens=5) == ("max_tokens", None)
        text = (await ask(server)).json()["content"][0]["text"]
        assert await stop(stop_sequences=["never", text[2:4]]) == ("stop_sequence", text[2:4])
        assert await stop(timeout=1e-9) == ("timeout", None)
    limits = {"model": {"max_model_len": 64}, "runner": {"simulated_output_tokens": 4000}}
    async with start_server(**limits) as server:
        assert await stop(max_tokens=4000) == ("model_context_window_exceeded", None)


async def test_a_stream_that_fails_ends_with_anthropics_error(start_server):
    async with start_server(runner={"step_base_ms": 5}) as server:
        answering = asyncio.create_task(ask(server, max_tokens=4000, stream=True))
        async with asyncio.timeout(PATIENCE):
            while not (await server.gauges())["num_requests_running"]:  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            await asyncio.sleep(0.05)
        parts = server.engine._parts
        [request_id] = parts.output_processor._states
        parts.output_processor.fail_requests([request_id], ValueError("secret"), 0.0)
        *_, (name, event) = events_of(await answering)
        assert name == "error"
        assert event["error"] == {"type": "api_error", "message": "internal server error"}


async def test_the_client_and_the_extensions_reach_the_engine(server, monkeypatch):
    asked = []
    add_request = server.engine.add_request

    async def note(prompt, params, **fields):
        asked.append(fields)
        return await add_request(prompt, params, **fields)

    monkeypatch.setattr(server.engine, "add_request", note)
    own = {"request_id": "x", "priority": -1, "timeout": 60.0, "cache_salt": "s"}
    assert (await ask(server, metadata={"user_id": "ann"}, **own)).json()["id"] == "x"
    assert asked == [{**own, "user": "ann"}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [TURN]}, [TURN]),
        ({"messages": [TURN], "system": ""}, [TURN]),
        ({"messages": [TURN], "system": "S"}, [{"role": "system", "content": "S"}, TURN]),
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
    assert template_messages(msgspec.convert(body, CountTokensRequest)) == expected


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages must not be empty"),
        ([TURN, {"role": "assistant", "content": "x"}], "messages[1].role: the last message"),
        (
            [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}],
            "messages[0].content[0]: blocks of type 'image'",
        ),
        (
            [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}],
            "messages[0].content[0]: blocks of type 'tool_result'",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "citations": [{}]}]}],
            "messages[0].content[0].citations is not supported",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"typ": "text"}]}], "did you mean 'type'"),
        ([{"role": "system", "content": "x"}], "messages[0].role"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_messages_that_cannot_be_rendered_are_refused_with_their_place(
    server, path, messages, where
):
    body = {"messages": messages} if "count" in path else {**BODY, "messages": messages}
    answer = await server.request("POST", path, json=body)
    assert answer.status == 400
    assert where in answer.json()["error"]["message"]
