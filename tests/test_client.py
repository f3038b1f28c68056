"""`AsyncClient` against a real server: the same outputs and errors as from the engine itself."""

import asyncio
from contextlib import aclosing, suppress

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from aioserve import AsyncClient, AsyncEngine, EngineConfig, SamplingParams
from aioserve.client import connection
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.errors import (
    AioserveError,
    EngineDeadError,
    EngineOverloadedError,
    RequestError,
    RequestFailedError,
    RequestIdInUseError,
)
from aioserve.outputs import FinishReason
from aioserve.server.app import listening
from aioserve.server.sockets import bind
from tests.processes import PATIENCE

CONFIG = EngineConfig(
    runner=RunnerConfig(
        runner="simulated", step_base_ms=1, step_prefill_token_us=1, step_decode_us=1
    )
)
ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "Who's there?"}]


@pytest.fixture
async def engine():
    async with AsyncEngine(CONFIG) as engine:
        yield engine


@pytest.fixture
async def url(engine):
    async with listening(engine, bind("127.0.0.1", 0)) as url:
        yield url


@pytest.fixture
async def client(url):
    async with AsyncClient(url) as client:
        yield client


async def gather(outputs):
    """All deltas of a one-sample stream as one output, without what differs by nature."""
    whole = None
    async for output in outputs:
        if whole is None:
            whole = output
        else:
            whole.merge(output)
    return msgspec.structs.replace(whole, request_id="", num_cached_tokens=0, times=None)


PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(),  # no limit: to the end of the reply, not OpenAI's 16 tokens
    SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=20, stop=("e",), include_stop_str_in_output=True),
    SamplingParams(max_tokens=20, temperature=0.3, top_k=4, seed=1, logit_bias={7: 1.5}),
    SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2, output_kind="final_only"),
    SamplingParams(max_tokens=12, output_kind="final_only", stop=("e",)),
    SamplingParams(max_tokens=3, prompt_logprobs=1),
    SamplingParams(max_tokens=0, prompt_logprobs=0, output_kind="final_only"),
    SamplingParams(max_tokens=12, detokenize=False),
    SamplingParams(max_tokens=12, detokenize=False, output_kind="final_only"),
]


@pytest.mark.parametrize("prompt", ["Once upon", [5, 6, 7]])
async def test_outputs_are_those_of_the_engine(engine, client, prompt):
    for params in PARAMS:
        local = await gather(engine.generate(prompt, params))
        remote = await gather(client.generate(prompt, params))
        assert remote == local, params
        assert remote.finished


async def test_chat_outputs_are_those_of_the_engine(engine, client):
    for params in PARAMS:
        local = await gather(engine.generate(MESSAGES, params))
        assert await gather(client.generate(MESSAGES, params)) == local, params
        told = await gather(engine.chat(MESSAGES, params))
        assert await gather(client.chat(MESSAGES, params)) == told, params
        assert (told.text, told.token_ids) == (local.text, local.token_ids)


async def test_samples_are_told_apart(client):
    params = SamplingParams(n=3, max_tokens=4, ignore_eos=True)
    token_ids = {0: [], 1: [], 2: []}
    reasons = {}
    async for output in client.generate("Hello", params):
        token_ids[output.index] += output.token_ids
        assert output.num_output_tokens == len(token_ids[output.index])
        if output.finished:
            reasons[output.index] = output.finish_reason
    assert [len(ids) for ids in token_ids.values()] == [4, 4, 4]
    assert reasons == dict.fromkeys(range(3), FinishReason.LENGTH)


async def test_final_only_is_one_output_for_each_sample(engine, client):
    params = SamplingParams(n=3, max_tokens=40, ignore_eos=True, output_kind="final_only")
    for outputs in (client.generate("Hello", params), client.chat(MESSAGES, params)):
        finals = [output async for output in outputs]
        assert [o.index for o in finals] == [0, 1, 2]
        assert all(o.finished and o.text for o in finals)
        assert [len(o.token_ids) for o in finals] == [o.num_output_tokens for o in finals]
        assert [o.num_output_tokens for o in finals] == [40, 40, 40]


async def test_no_text_is_made_for_who_wants_token_ids_alone(client):
    params = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
    outputs = [output async for output in client.generate("Hello", params)]
    assert not any(output.text for output in outputs)
    assert sum(len(output.token_ids) for output in outputs) == 8
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop="x", detokenize=False)
    assert caught.value.param == "stop"


@pytest.mark.parametrize("output_kind", ["delta", "final_only"])
async def test_an_id_that_the_caller_chose_is_the_engines(engine, client, output_kind):
    one = SamplingParams(max_tokens=2, ignore_eos=True, output_kind=output_kind)
    outputs = [output async for output in client.generate("Hello", one, request_id="mine")]
    assert {output.request_id for output in outputs} == {"mine"}
    async with aclosing(client.chat(MESSAGES, ENDLESS, request_id="mine")) as running:
        await anext(running)
        with pytest.raises(RequestIdInUseError):
            await anext(client.generate("Hello", one, request_id="mine"))
        assert engine.abort_now("mine")
        reasons = [output.finish_reason async for output in running]
    assert reasons[-1] is FinishReason.ABORT


async def test_an_error_names_the_line_in_the_servers_log(engine, client, caplog):
    caplog.set_level("INFO")
    with pytest.raises(RequestError) as caught:
        await anext(client.generate([10**6], SamplingParams()))
    [line] = [line for line in caplog.messages if str(caught.value.request_id) in line]
    assert "HTTP 400" in line
    assert caught.value.__notes__ == [f"request id: {caught.value.request_id}"]


async def test_headers_and_a_key_go_with_every_request():
    heads = []

    async def handle(reader, writer):
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        url = f"http://{host}:{port}"
        async with AsyncClient(url, api_key="s3cret", headers={"X-Tenant": "ann"}) as client:
            assert await client.health()
            with pytest.raises(AioserveError):
                await anext(client.generate("Hello"))
    assert len(heads) == 2
    for head in heads:
        assert "Authorization: Bearer s3cret\r\n" in head
        assert "X-Tenant: ann\r\n" in head


async def test_a_message_with_a_misspelt_field_is_not_sent_without_it(client):
    with pytest.raises(RequestError, match="nam"):
        client.chat([{"role": "user", "content": "x", "nam": "Will"}])


async def until_aborted(engine) -> None:
    """One request was aborted, rather than run to its end, and nothing is left of it."""
    async with asyncio.timeout(PATIENCE):
        while True:
            text = engine.metrics.render().decode()
            if "requests_running 0.0" in text and "used_blocks 0.0" in text:
                assert 'aioserve_requests_finished_total{reason="abort"} 1.0' in text
                return
            await asyncio.sleep(0.002)


async def test_leaving_the_loop_aborts_at_the_server(engine, client):
    async for _ in client.generate("Hello", ENDLESS):
        break
    await until_aborted(engine)


async def test_closing_the_stream_aborts_at_the_server(engine, client):
    async with aclosing(client.chat(MESSAGES, ENDLESS)) as outputs:
        await anext(outputs)
    await until_aborted(engine)


async def test_cancelling_the_task_aborts_at_the_server(engine, client):
    got_one = asyncio.Event()

    async def consume():
        async for _ in client.generate("Hello", ENDLESS):
            got_one.set()

    task = asyncio.create_task(consume())
    await got_one.wait()
    task.cancel()
    await asyncio.wait([task])
    await until_aborted(engine)


async def test_a_connection_serves_one_request_after_another(client):
    for _ in range(3):
        await gather(client.generate("Hello", SamplingParams(max_tokens=2)))
    [connections] = client._connection.session().connector._conns.values()
    assert len(connections) == 1


async def test_a_prompt_of_megabytes_is_refused_by_the_server(client):
    with pytest.raises(RequestError, match="limit"):
        await anext(client.generate("word " * 2**19))


async def test_a_refusal_is_a_request_error_with_its_param(client):
    with pytest.raises(RequestError) as caught:
        await anext(client.generate([10**9]))
    assert caught.value.param == "prompt"
    with pytest.raises(RequestError) as caught:
        await anext(client.chat([{"role": "user", "content": ""}] * 3000))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "messages", [[{"role": "king", "content": "x"}], [{"role": "user", "content": 5}]]
)
async def test_messages_that_cannot_be_sent_are_a_request_error(client, messages):
    with pytest.raises(RequestError) as caught:
        client.chat(messages)
    assert caught.value.param == "messages"


async def test_another_model_is_a_request_error(url):
    async with AsyncClient(url, model="gpt-4o") as client:
        with pytest.raises(RequestError) as caught:
            await anext(client.generate("Hello"))
    assert caught.value.param == "model"


async def test_a_full_queue_is_an_overload_with_a_time_to_wait():
    limits = SchedulerConfig(max_num_seqs=1, max_waiting_requests=1)
    config = msgspec.structs.replace(CONFIG, scheduler=limits)
    async with (
        AsyncEngine(config) as engine,
        listening(engine, bind("127.0.0.1", 0)) as url,
        AsyncClient(url) as client,
    ):
        runs = [gather(client.generate([5, i], ENDLESS)) for i in range(6)]
        tasks = [asyncio.create_task(run) for run in runs]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        error = done.pop().exception()
        assert isinstance(error, EngineOverloadedError)
        assert error.retry_after >= 1
        for task in pending:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_server_that_drains_is_not_healthy_and_refuses(engine, client):
    assert await client.health() is True
    await engine.shutdown()
    assert await client.health() is False
    with pytest.raises(EngineDeadError, match="shutting down"):
        await anext(client.generate("Hello"))


async def test_a_server_that_is_not_there_is_an_engine_dead_error():
    [sock] = bind("127.0.0.1", 0)  # bound, but nobody listens
    with sock:
        # What is asked now is answered now: retries are for requests.
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with AsyncClient(url, retries=10**6) as client, asyncio.timeout(60):
            assert await client.health() is False
        async with AsyncClient(url) as client:
            with pytest.raises(EngineDeadError, match="no answer from http://127"):
                await anext(client.generate("Hello"))


async def test_a_proxy_that_asks_for_hours_is_asked_again_after_the_longest_pause(monkeypatch):
    told = iter((503, 429, 200))
    body = b'{"count": 1, "max_model_len": 64, "tokens": [5], "token_strs": null}'

    async def answer(_):
        status, headers = next(told), {"Retry-After": "86400"}
        return web.Response(status=status, headers=headers, body=body if status == 200 else b"")

    monkeypatch.setattr(connection, "MAX_RETRY_SECONDS", 0.01)
    app = web.Application()
    app.router.add_post("/tokenize", answer)
    async with (
        TestServer(app) as server,
        AsyncClient(str(server.make_url("")), retries=2) as client,
    ):
        async with asyncio.timeout(PATIENCE):
            assert list(await client.tokenize("Hello")) == [5]


MESSAGES = [{"role": "user", "content": "Hello"}]


async def answer_with(
    data: bytes,
    client_timeout: float | None = None,
    ask=lambda client: client.generate("Hello"),
):
    """What `ask` yields of a client whose server says `data` and hangs up, or hangs.

    Nobody knows how far a client comes that gives up: it may not even have connected.
    """
    handlers = set()

    async def handle(reader, writer):
        handlers.add(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(data)
            await writer.drain()
            if client_timeout is not None:
                await reader.read()
        writer.close()
        await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        try:
            async with AsyncClient(f"http://{host}:{port}", timeout=client_timeout) as client:
                return [output async for output in ask(client)]
        finally:
            if handlers:
                await asyncio.wait(handlers)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", EngineDeadError, "no answer"),
        (HEAD, EngineDeadError, "no answer"),
        (HEAD + END, RequestFailedError, "before the last output"),
        (HEAD + chunk(b"data: {broken}\n\n") + END, RequestFailedError, "cannot be read"),
        (
            HEAD + chunk(b'data: {"error":{"message":"ouch","type":"x"}}\n\n') + END,
            RequestFailedError,
            "ouch",
        ),
        (
            b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\nConnection: close\r\n\r\nproxy",
            RequestFailedError,
            "HTTP 502.*proxy",
        ),
    ],
    ids=["nothing", "cut", "empty", "not_json", "error_event", "proxy"],
)
async def test_a_broken_answer_is_an_error_of_ours(data, error, message):
    with pytest.raises(error, match=message):
        await answer_with(data)


CHUNK = '{"id":"a","object":"chat.completion.chunk","created":1,"model":"m","choices":[%s]}'
CALL = '{"index":0,"delta":{"tool_calls":[{"index":%d,"function":{"arguments":"{}"}}]}}'


@pytest.mark.parametrize("index", [1, -1])
async def test_a_call_that_a_server_never_began_is_an_error_of_ours(index):
    event = f"data: {CHUNK % (CALL % index)}\n\n".encode()
    with pytest.raises(RequestFailedError, match=f"tool call {index} before its beginning"):
        await answer_with(HEAD + chunk(event) + END, ask=lambda client: client.chat(MESSAGES))


async def test_a_stream_that_is_done_without_a_last_output_is_an_error_of_ours():
    text = '{"index":0,"delta":{"content":"Hi"}}'
    event = f"data: {CHUNK % text}\n\ndata: [DONE]\n\n".encode()
    for ask in (AsyncClient.generate_one, AsyncClient.chat_one):
        with pytest.raises(EngineDeadError, match="before its last output"):
            await answer_with(
                HEAD + chunk(event) + END, ask=lambda client, ask=ask: once(ask(client, MESSAGES))
            )


async def once(awaitable):
    yield await awaitable


async def test_silence_beyond_the_timeout_is_an_engine_dead_error():
    with pytest.raises(EngineDeadError, match="no answer"):
        await answer_with(HEAD, client_timeout=0.05)


async def test_models_tell_name_and_limit(engine, client):
    [card] = await client.models()
    assert (card.id, card.max_model_len) == ("embedded", engine.max_model_len)
