"""Steps that raise, engines that die, servers that stop: what a client gets to see."""

import asyncio
import json
import re

import pytest

from aioserve.errors import RunnerDeadError
from aioserve.model_source.info import ModelInfo
from aioserve.runner.simulated import SimulatedRunner
from aioserve.server.generation import EventStream
from tests.processes import PATIENCE
from tests.server.raw_client import RawClient, until_idle
from tests.server.serving import SIMULATED

ENDLESS = {"max_tokens": 3000, "ignore_eos": True}


class FailingRunner(SimulatedRunner):
    """Raises `error` in the step after `fail_next` was set."""

    def __init__(self, error: Exception) -> None:
        super().__init__(SIMULATED, ModelInfo(SIMULATED.model))
        self.error = error
        self.fail_next = False

    def execute_model(self, scheduler_output):
        if self.fail_next and scheduler_output.num_scheduled_tokens:
            self.fail_next = False
            future = asyncio.get_running_loop().create_future()
            future.set_exception(self.error)
            return future
        return super().execute_model(scheduler_output)


async def start_stream(server, **fields):
    """A streamed completion of which some events were read."""
    body = {"prompt": "Hello", "stream": True, **ENDLESS, **fields}
    response = await server.session.post(server.url + "/v1/completions", json=body)
    await response.content.readuntil(b"\n\n")
    return response


@pytest.mark.parametrize("stream", [False, True])
async def test_a_step_that_fails_before_the_first_token_is_a_500(start_server, stream):
    runner = FailingRunner(ValueError("bad luck"))
    async with start_server(runner) as server:
        runner.fail_next = True
        answer = await server.complete(stream=stream)
        assert answer.status == 500
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "request_failed")
        assert (await server.complete(max_tokens=2)).status == 200


async def test_a_step_that_fails_later_ends_the_stream_with_an_error_event(start_server):
    runner = FailingRunner(ValueError("bad luck"))
    async with start_server(runner) as server:
        response = await start_stream(server)
        runner.fail_next = True
        *_, last, end = (await response.read()).split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "request_failed"
        assert end == b""
        assert (await server.complete(max_tokens=2)).status == 200


@pytest.mark.parametrize("num_prompts", [1, 3])
async def test_a_dead_engine_ends_streams_and_refuses_with_503(start_server, num_prompts):
    runner = FailingRunner(RunnerDeadError("device lost"))
    async with start_server(runner) as server:
        prompts = [[5, i] for i in range(num_prompts)]
        response = await start_stream(server, prompt=prompts)
        runner.fail_next = True
        last = (await response.read()).split(b"\n\n")[-2]
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
        answer = await server.complete()
        assert answer.status == 503
        assert "device lost" in answer.json()["error"]["message"]
        for path in ("/livez", "/health", "/ready"):
            answer = await server.get(path)
            assert answer.status == 503
            assert answer.json()["status"] == "dead"
            assert "device lost" in answer.json()["reason"]
        assert (await server.get("/metrics")).status == 200


FAILING = """
from aioserve.policies.fcfs import FCFSScheduler


class Failing(FCFSScheduler):
    def schedule(self):
        raise ValueError("no idea")
"""


async def test_where_the_policy_fails_a_plain_one_plans_and_ready_says_so_until_a_switch(
    start_server, tmp_path
):
    (tmp_path / "failing.py").write_text(FAILING)
    policy = {"policy": f"{tmp_path / 'failing.py'}:Failing"}
    async with start_server(server={"enable_admin": True}) as server:

        async def switch(body):
            return (await server.request("POST", "/admin/policy", json=body)).status

        response = await start_stream(server, max_tokens=400)
        assert await switch(policy) == 200
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        for _ in range(3):
            assert (await server.complete()).status == 200
        answer = await server.get("/ready")
        assert (answer.status, answer.json()["status"]) == (200, "ready")
        reason = (
            "plans in the place of .*Failing: .*Failing raised ValueError.'no idea'. in schedule"
        )
        assert re.search(reason, answer.json()["reason"])
        assert (await server.get("/livez")).json() == {"status": "ok"}
        assert re.search(reason, (await server.get("/health")).json()["reason"])
        assert await switch({"policy": "fcfs"}) == 200
        assert (await server.get("/ready")).json() == {"status": "ready"}
        assert (await server.complete(max_tokens=2)).status == 200


async def test_an_unexpected_error_is_logged_and_not_described(server, monkeypatch, caplog):
    async def broken(*args, **kwargs):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(server.front, "add_request", broken)
    answer = await server.complete()
    assert answer.status == 500
    assert answer.json()["error"]["message"] == "internal server error"
    assert b"secret detail" not in answer.body
    assert "secret detail" in caplog.text


async def test_what_fails_in_the_midst_of_an_answer_cuts_it_off(server, monkeypatch, caplog):
    """A second head in the middle of a body would be read as a part of it."""

    async def broken(*args):
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(EventStream, "end", broken)
    client = await RawClient.post(server, prompt="Hello", stream=True, max_tokens=5)
    async with asyncio.timeout(PATIENCE):
        received = await client.reader.read()
    assert received.startswith(b"HTTP/1.1 200")
    assert received.count(b"HTTP/1.1") == 1
    assert not received.endswith(b"0\r\n\r\n")  # so the client knows
    assert "failed in its answer, which is cut off" in caplog.text
    assert "planted" in caplog.text
    await client.leave()
    await until_idle(server, num_aborted=0)


async def test_while_draining_ready_is_503_and_running_streams_finish(server):
    response = await start_stream(server, max_tokens=300)
    shutdown = asyncio.create_task(server.engine.shutdown(drain_timeout=PATIENCE))
    await asyncio.sleep(0)  # the task begins
    assert server.engine.health().status == "draining"
    ready, refused = await server.get("/ready"), await server.complete()
    assert (ready.status, ready.json()["status"]) == (503, "draining")
    assert (await server.get("/livez")).status == 200
    assert (await server.get("/health")).json()["status"] == "draining"
    assert refused.status == 503
    assert all(int(answer.headers["Retry-After"]) > 0 for answer in (ready, refused))
    assert "shutting down" in refused.json()["error"]["message"]
    *_, last, done, _end = (await response.read()).split(b"\n\n")
    assert done == b"data: [DONE]"
    assert json.loads(last.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
    await shutdown


async def test_what_does_not_finish_in_time_ends_with_reason_abort(server):
    response = await start_stream(server)
    await server.engine.shutdown(drain_timeout=0)
    *_, last, done, _end = (await response.read()).split(b"\n\n")
    assert done == b"data: [DONE]"
    assert json.loads(last.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "abort"
