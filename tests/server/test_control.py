"""The routes by which an operator pauses a server, has it sleep, and changes what it tells."""

import asyncio
import json
import logging
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from tests.processes import PATIENCE, read_lines, serving, started

ADMIN = {"enable_admin": True}


async def post(server, path, body=None):
    answer = await server.request("POST", f"/admin/{path}", json=body)
    return answer.status, answer.json()


async def test_a_paused_server_is_not_ready_and_its_streams_go_on_later(start_server):
    async with start_server(server=ADMIN) as server:
        body = {"prompt": "Hello", "stream": True, "max_tokens": 200, "ignore_eos": True}
        response = await server.session.post(server.url + "/v1/completions", json=body)
        await response.content.readuntil(b"\n\n")
        assert await post(server, "pause", {}) == (200, {"state": "paused"})
        ready = await server.get("/ready")
        assert (ready.status, ready.json()["status"]) == (503, "paused")
        assert (await server.get("/health")).status == 503
        assert (await server.get("/livez")).status == 200
        late = asyncio.create_task(server.complete(max_tokens=2, ignore_eos=True))
        steps = server.engine.get_stats().num_steps
        await asyncio.sleep(0.05)
        assert server.engine.get_stats().num_steps == steps
        assert await post(server, "resume") == (200, {"state": "running"})
        async with asyncio.timeout(PATIENCE):
            rest = await response.read()
        last, done = rest.split(b"\n\n")[-3:-1]
        assert done == b"data: [DONE]"
        choice = json.loads(last.removeprefix(b"data: "))["choices"][0]
        assert choice["finish_reason"] == "length"
        assert (await late).status == 200
        assert (await server.get("/ready")).status == 200


async def test_who_comes_in_a_pause_can_be_refused(start_server):
    async with start_server(server=ADMIN) as server:
        await post(server, "pause", {"arrivals": "refuse", "running": "abort"})
        refused = await server.complete()
        assert (refused.status, refused.json()["error"]["code"]) == (503, "engine_paused")
        assert int(refused.headers["Retry-After"]) > 0
        await post(server, "resume")
        assert (await server.complete(max_tokens=2)).status == 200


async def test_a_server_sleeps_and_wakes(start_server):
    async with start_server(server=ADMIN) as server:
        assert await post(server, "sleep", {"weights": True}) == (200, {"state": "asleep"})
        text = (await server.get("/metrics")).body
        assert b'aioserve_engine_state{state="asleep"} 1.0' in text
        assert b'aioserve_engine_state{state="running"} 0.0' in text
        status, body = await post(server, "resume")
        assert status == 400
        assert "wake" in body["error"]["message"]
        assert await post(server, "wake") == (200, {"state": "running"})
        status, body = await post(server, "wake")
        assert status == 400
        assert (await server.complete(max_tokens=2)).status == 200


NO_SENSE = [
    ("pause", {"running": "drop"}, "running"),
    ("pause", {"run": "keep"}, "run"),
    ("sleep", {"weights": 3}, "weights"),
    ("reload", {}, "path"),
    ("reload", {"path": "a\0b"}, "NUL"),
    ("reload", {"path": "/no/such/model"}, "reload is not served by this engine's runner"),
    ("shadow", {"policy": "fcsf"}, "unknown policy"),
    ("shadow", {"policy": "chunked_prefill", "options": {"chunk_size": 0}}, "chunk_size"),
    ("log_level", {"level": "loud"}, "level"),
]


async def test_what_makes_no_sense_is_a_400_that_says_what(start_server):
    async with start_server(server=ADMIN) as server:
        for path, body, message in NO_SENSE:
            status, told = await post(server, path, body)
            assert status == 400, (path, body)
            assert message in told["error"]["message"]
            assert server.engine.state == "running"


async def test_the_shadow_is_switched(start_server):
    async with start_server(server=ADMIN) as server:
        assert await post(server, "shadow", {"policy": "fcfs"}) == (200, {"status": "ok"})
        await server.complete(max_tokens=2)
        assert b"aioserve_shadow_cost_seconds_total" in (await server.get("/metrics")).body
        assert await post(server, "shadow", {"policy": None}) == (200, {"status": "ok"})
        assert b"aioserve_shadow" not in (await server.get("/metrics")).body


async def test_the_log_tells_more_or_less(start_server, caplog):
    own = logging.getLogger("aioserve")
    try:
        async with start_server(server=ADMIN) as server:
            assert await post(server, "log_level", {"level": "debug"}) == (200, {"status": "ok"})
            await server.complete(max_tokens=1)
            assert [r for r in caplog.records if r.levelno == logging.DEBUG]
            await post(server, "log_level", {"level": "error"})
            caplog.clear()
            await server.complete(max_tokens=1)
            assert not [r for r in caplog.records if r.name.startswith("aioserve.")]
    finally:
        own.setLevel(logging.NOTSET)


async def test_the_routes_are_not_there_unless_enabled(server):
    for path in ("pause", "resume", "sleep", "wake", "reload", "shadow", "log_level"):
        assert (await server.request("POST", f"/admin/{path}", json={})).status == 404


@pytest.mark.parametrize(
    "words", [(), pytest.param(("--api-workers", "1"), marks=pytest.mark.dist)], ids=["one", "two"]
)
def test_a_hangup_has_the_policy_read_again(words, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("scheduler: {policy: fcfs, max_num_seqs: 9}")
    command = ("--config", str(path), "--runner", "simulated", *words)
    with serving(*command) as (process, url):

        def policies():
            with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as response:
                text = response.read().decode()
            return re.findall(r'^aioserve_(\w*)policy_info{.*policy="(\w+)".*} 1.0', text, re.M)

        lines = read_lines(process)

        def hang_up(config, expected):
            path.write_text(config)
            process.send_signal(signal.SIGHUP)
            while expected not in (line := lines.get(timeout=PATIENCE)):
                assert line

        assert policies() == [("", "fcfs")]
        shadow = "shadow: {shadow_policy: hrrn}"
        hang_up(f"scheduler: {{policy: priority}}\n{shadow}", "shadow policy is now hrrn")
        both = [("", "priority"), ("shadow_", "hrrn")]
        assert policies() == both
        waiting = "these changes wait for a restart: scheduler.max_num_seqs, server.drain_timeout"
        hang_up(f"scheduler: {{policy: priority}}\nserver: {{drain_timeout: 7}}\n{shadow}", waiting)
        hang_up("scheduler: {policy: fcsf}", "unknown policy 'fcsf'")
        hang_up("scheduler: [", "config.yaml")
        assert policies() == both
        hang_up("scheduler: {policy: fcfs}", "shadow policy is now None")
        assert policies() == [("", "fcfs")]


def test_a_hangup_while_it_loads_is_heard_when_it_serves(tmp_path):
    """A key that is taken back in those minutes would stay good."""
    path = tmp_path / "config.yaml"
    path.write_text("scheduler: {policy: fcfs}")
    words = ("-m", "aioserve", "serve", "--port", "0", "--config", str(path))
    command = (sys.executable, *words, "--runner", "simulated")
    with started(*command, stderr=subprocess.PIPE) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "says when the model is loaded" in line:
                path.write_text("scheduler: {policy: priority}")
                process.send_signal(signal.SIGHUP)
            if "listening on" in line:
                break
    assert any("policy is now priority" in line for line in lines), lines
