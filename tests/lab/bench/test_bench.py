"""The load generator against real servers on real sockets: counts, closed loops, errors."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.cli.main import main
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.lab.bench import Load, Target, render, summarize
from aioserve.lab.slo import ServiceLevels, Slo
from aioserve.lab.workloads.synthetic import WorkloadSpec, generate
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.server.app import listening
from aioserve.server.sockets import bind
from tests import processes
from tests.processes import PATIENCE


def closed(clients: int, num_requests: int, **fields: Any) -> Workload:
    kind = {
        "name": "bench",
        "prompt": {"kind": "constant", "value": 20},
        "output": {"kind": "uniform", "min": 2, "max": 9},
    }
    spec = {
        "arrivals": {"kind": "closed", "clients": clients},
        "num_requests": num_requests,
        "classes": [kind | fields],
    }
    return generate(msgspec.convert(spec, WorkloadSpec))


@asynccontextmanager
async def serving(**scheduler: Any) -> AsyncIterator[tuple[str, AsyncEngine]]:
    """aioserve with invented tokens, a step per millisecond."""
    config = EngineConfig(
        runner=RunnerConfig(
            runner="simulated", step_base_ms=1, step_prefill_token_us=1, step_decode_us=1
        ),
        scheduler=SchedulerConfig(**scheduler),
    )
    async with AsyncEngine(config) as engine, listening(engine, bind("127.0.0.1", 0)) as url:
        yield url, engine


@asynccontextmanager
async def answering(handler: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    """A server of another make: it has one endpoint and no list of models."""
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    sock = bind("127.0.0.1", 0)[0]
    await web.SockSite(runner, sock).start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await runner.cleanup()


async def measure(url: str, workload: Workload, **target: Any) -> tuple[Load, dict[str, Any]]:
    load = Load(Target(url=url, **target), workload)
    await load.run()
    return load, summarize(load, ServiceLevels(Slo(ttft=60.0)))


async def test_every_token_that_was_asked_for_is_counted() -> None:
    workload = closed(4, 20)
    asked = sum(request.output_tokens for request in workload.requests)
    async with serving() as (url, _engine):
        load, document = await measure(url, workload)
    assert document["requests"] == {"sent": 20, "finished": 20, "failed": 0, "unfinished": 0}
    assert document["tokens"]["prompt"] == document["tokens"]["prompt_asked"] == 20 * 20
    assert document["tokens"]["output"] == document["tokens"]["output_asked"] == asked
    assert document["tokens"]["without_usage"] == 0
    assert document["totals"]["good_share"] == 1
    assert load.model == "embedded"
    for exchange in load.exchanges:
        times = exchange.token_times
        assert exchange.arrival < times[0] <= times[-1] <= exchange.end
    assert "output tokens/s" in render(document)


async def test_a_closed_loop_keeps_n_requests_in_flight_and_never_more() -> None:
    async with serving() as (url, _engine):
        load, _ = await measure(url, closed(5, 40))
    exchanges = load.exchanges
    for i in range(5, 40):
        assert exchanges[i].arrival >= exchanges[i - 5].end  # each client waits for its answer
    changes = sorted([(e.arrival, 1) for e in exchanges] + [(e.end, -1) for e in exchanges])
    in_flight = list(accumulate(change for _, change in changes))
    assert max(in_flight) == 5


async def test_a_shared_prefix_is_found_in_the_cache() -> None:
    prefixes = {"count": 1, "length": {"kind": "constant", "value": 64}}
    async with serving() as (url, _engine):
        _, document = await measure(url, closed(1, 5, prefixes=prefixes))
    assert document["tokens"]["prompt"] == 5 * 84
    assert document["tokens"]["cached"] == 4 * 64
    assert "had 61% of the prompt tokens in its cache" in " ".join(document["notes"])


async def test_a_conversation_sends_the_replies_it_got() -> None:
    turn = Piece(1, 32)
    requests = (
        WorkloadRequest(0.0, (turn,), 32),
        WorkloadRequest(0.0, (turn, Piece(2, 32, reply_of=0), Piece(3, 8)), 4, follows=0),
    )
    async with serving() as (url, _engine):
        load, _ = await measure(url, Workload("talk", requests))
    # the reply's last token was never computed, so its last block was not kept
    assert load.exchanges[1].num_cached_tokens == 48


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_words_stand_in_where_ids_are_not_sent(endpoint: str) -> None:
    async with serving() as (url, _engine):
        _, document = await measure(url, closed(2, 4), prompts="text", endpoint=endpoint)
    assert document["requests"]["finished"] == 4
    assert document["target"]["prompts"] == "text"
    assert document["tokens"]["prompt"] >= document["tokens"]["prompt_asked"]


async def test_a_wrong_model_and_a_full_queue_are_counted_by_kind() -> None:
    async with serving(max_num_seqs=1, max_waiting_requests=1) as (url, engine):
        _, wrong = await measure(url, closed(2, 6), model="another")
        endless = SamplingParams(max_tokens=4000, ignore_eos=True)
        async with await engine.add_request([5], endless) as stream:
            await anext(aiter(stream))  # it has the seat: the next one waits
            async with await engine.add_request([5], endless):
                _, full = await measure(url, closed(8, 8))
    (error,) = wrong["errors"]
    assert (error["kind"], error["count"]) == ("HTTP 404", 6)
    assert "another" in error["example"]
    assert wrong["requests"]["failed"] == 6
    (error,) = full["errors"]
    assert (error["kind"], error["count"]) == ("HTTP 429", 8)
    assert "8 x HTTP 429" in render(full)


async def test_a_server_that_dies_is_named() -> None:
    async with serving() as (url, engine):
        has_begun = asyncio.Event()
        load = Load(Target(url=url), closed(1, 50), progress=lambda _: has_begun.set())
        running = asyncio.create_task(load.run())
        await has_begun.wait()
        await asyncio.sleep(0.002)  # the second request is under way
        await engine.shutdown()
        await running
    document = summarize(load)
    errors = {error["kind"]: error["count"] for error in document["errors"]}
    assert set(errors) <= {"finish reason abort", "HTTP 500", "HTTP 503"}
    assert sum(errors.values()) == 50 - document["requests"]["finished"] > 0


EVENTS = [
    b'data: {"choices":[{"text":""}]}\r\n\r\n: ping\r\n\r\n',
    b'data: {"choices":[{"text":"a"}]}\r\n\r\ndata: {"choi',
    b'ces":[{"text":"bc","finish_reason":"stop"}]}\r\n\r\ndata: [DONE]\r\n\r\n',
]


def replying(*pieces: bytes) -> Callable[[web.Request], Any]:
    async def handle(request: web.Request) -> web.StreamResponse:
        if isinstance((await request.json()).get("prompt"), list):
            raise web.HTTPUnprocessableEntity(text="prompt must be a string")
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.002)
        await response.write_eof()
        return response

    return handle


async def test_another_server_is_understood_and_what_it_left_out_is_said() -> None:
    """No ids, no list of models, no usage, other line ends, comments, events in pieces."""
    async with answering(replying(*EVENTS)) as url:
        load, document = await measure(url, closed(1, 3))
    assert document["requests"]["finished"] == 3
    assert document["target"]["prompts"] == "text"
    assert [len(exchange.token_times) for exchange in load.exchanges] == [2, 2, 2]
    assert document["tokens"]["output"] == 6
    notes = " ".join(document["notes"])
    assert "3 replies came without usage" in notes
    assert f"{document['tokens']['output_asked']} output tokens were asked for, 6 came" in notes


@pytest.mark.parametrize(
    ("piece", "kind"),
    [
        (b'data: {"choices":[{"text":"a"}]}\n\n', "cut off"),
        (b'data: {"error":{"message":"no memory"}}\n\n', "error event"),
        (b"data: {oops\n\n", "not JSON"),
    ],
)
async def test_a_broken_stream_is_an_error_and_the_load_goes_on(piece: bytes, kind: str) -> None:
    async with answering(replying(piece)) as url:
        _, document = await measure(url, closed(1, 2), prompts="text")
    assert [(error["kind"], error["count"]) for error in document["errors"]] == [(kind, 2)]


async def test_a_request_on_a_connection_that_the_server_had_closed_is_sent_again() -> None:
    """llama-server says keep-alive, and closes some of its connections all the same."""
    body = b"".join(EVENTS)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
    replies = []

    async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if request.startswith(b"POST"):
            replies.append(request)
        writer.write(head % len(body) + body)
        with suppress(asyncio.IncompleteReadError):  # there is none after the last
            await reader.readuntil(b"POST")  # the next request: no answer
        writer.close()

    server = await asyncio.start_server(answer_once, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        _, document = await measure(f"http://127.0.0.1:{port}", closed(1, 4), prompts="text")
        assert document["errors"] == []
        assert document["requests"]["finished"] == len(replies) == 4


async def test_extra_fields_reach_the_server_and_null_removes_one() -> None:
    bodies = []

    async def handle(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        return web.Response(status=503)

    async with answering(handle) as url:
        await measure(url, closed(1, 1), extra_body={"min_tokens": 3, "ignore_eos": None})
    assert all(body["min_tokens"] == 3 and "ignore_eos" not in body for body in bodies)


@pytest.mark.slow
async def test_a_run_can_be_cut_by_time() -> None:
    for seconds in (0.3, 3, 30, PATIENCE):  # until it is enough for this machine
        async with serving() as (url, _engine):
            load = Load(Target(url=url), closed(8, 100_000))
            await load.run(max_seconds=seconds)
        document = summarize(load)
        assert load.is_cut
        if document["requests"]["finished"]:
            break
    assert 0 < document["requests"]["finished"] < 100_000
    unfinished = document["requests"]["unfinished"]
    assert 0 < unfinished <= 8  # without clients that were between two requests
    assert document["requests"]["finished"] + unfinished == document["requests"]["sent"]
    assert f"Cut short: {unfinished} requests had no end yet" in document["notes"][0]


def test_nobody_there_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    for words in ([], ["--model", "some", "--prompts", "text"]):
        assert main(["bench", url, "--num-requests", "1000", *words]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err == f"aioserve: error: {url}: connection refused\n"


@pytest.fixture(scope="module")
def url() -> Any:
    """A server in a process of its own, 5 ms a step; the tests take turns."""
    words = ["--runner", "simulated", "--step-base-ms", "5"]
    with processes.serving(*words, is_shared=True) as (_, url):
        yield url


def test_the_command_prints_a_table_and_json(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", url + "/v1/", "--concurrency", "4", "--num-requests", "8", "--warmup", "2"]
    assert main([*words, "--input-tokens", "9", "--output-tokens", "5", "--slo", "e2e=9"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert document["requests"]["finished"] == 8  # without those that warmed up
    assert document["tokens"]["output"] == 40
    assert document["client"]["cpu_us_per_token"] > 0
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"arrival": 0, "prompt_tokens": 20, "output_tokens": 3}\n' * 3)
    output = tmp_path / "out.json"
    assert main(["bench", url, "--workload", str(trace), "-o", str(output)]) == 0
    assert json.loads(output.read_bytes())["tokens"]["output"] == 9
    assert "{" not in capsys.readouterr().out
    lines = (
        '{"arrival": %s, "prompt_tokens": 20, "output_tokens": 3}\n' % (i / 10) for i in range(9)
    )
    trace.write_text("".join(lines))
    for cut, left in [("--start 0.35", 5), ("--duration 0.25", 3), ("--start 0.15 --limit 2", 2)]:
        command = ["bench", url, "--workload", str(trace), "-o", str(output), *cut.split()]
        assert main(command) == 0
        assert json.loads(output.read_bytes())["requests"]["finished"] == left, cut
    assert main(["bench", url, "--rate", "200", "--num-requests", "5", "-o", str(output)]) == 0
    assert json.loads(output.read_bytes())["requests"]["finished"] == 5


def num_finished(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    name = 'aioserve_requests_finished_total{reason="length"} '
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_ctrl_c_prints_what_was_measured_so_far(url: str) -> None:
    words = ["bench", url, "--concurrency", "2", "--output-tokens", "3", "--num-requests", "9999"]
    before = num_finished(url)
    command = [sys.executable, "-m", "aioserve", *words]
    with processes.started(*command, stdout=subprocess.PIPE) as process:
        processes.until(lambda: num_finished(url) >= before + 10, "ten requests")
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=PATIENCE)
    document = json.loads(printed.splitlines()[-1])
    assert process.returncode == 130
    assert 0 < document["requests"]["finished"] < 9999
    assert "Cut short" in document["notes"][0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench"], "URL"),
        (["bench", "localhost:8000"], "expected a URL such as"),
        (["bench", "http://h", "--concurrency", "0"], "whole number above 0"),
        (["bench", "http://h", "--rate", "1", "--concurrency", "2"], "not allowed with"),
        (["bench", "http://h", "--extra-body", "[1]"], "expected a JSON object"),
        (["bench", "http://h", "--workload", "none.yaml"], "cannot read workload none.yaml"),
        (["bench", "http://h", "--header", "nothing"], "NAME:VALUE"),
        (["bench", "http://h", "--slo", "fast"], "an SLO looks like"),
        (["bench", "http://h", "--limit", "3"], "--limit cuts a workload"),
        (["bench", "http://h", "--start", "3"], "--start cuts a workload"),
        (
            ["bench", "http://h", "--workload", "mixed", "--limit", "3", "--num-requests", "4"],
            "--limit and --num-requests mean the same",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    words: list[str], message: str, refused: Callable[[list[str], str], None]
) -> None:
    refused(words, message)
