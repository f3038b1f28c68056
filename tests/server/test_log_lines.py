"""What the log says of requests: one line each, in a fixed order, and nothing of their text."""

import asyncio
import json
import logging
import subprocess
import sys
import urllib.request

import aiohttp
import pytest
import yarl

from aioserve.support.logs import JsonFormatter
from tests.processes import PATIENCE, started

LINES = "aioserve.engine.request_log"
SECRET = "the fox is in the henhouse"


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == LINES]


async def test_a_request_has_one_line_with_its_fields_in_order(server, caplog):
    caplog.set_level(logging.INFO)
    await server.complete([5] * 64, max_tokens=3, ignore_eos=True, request_id="first")
    await server.complete([5] * 64, max_tokens=3, ignore_eos=True, request_id="second")
    words = [line.split() for line in lines(caplog)]
    assert [line[0] for line in words] == ["first", "second"]
    names = " ".join(word.partition("=")[0] for word in words[0][1:])
    assert names == "client key model prompt cached output ttft seconds finish"
    values = [dict(word.split("=") for word in line[1:]) for line in words]
    assert (values[0]["cached"], values[1]["cached"]) == ("0", "48")
    for each in values:
        assert 0 <= float(each.pop("ttft")) <= float(each.pop("seconds"))
        del each["cached"]
        assert each == {
            "client": "127.0.0.1",
            "key": "-",
            "model": "embedded",
            "prompt": "64",
            "output": "3",
            "finish": "length",
        }


async def test_one_that_got_no_token_says_so(start_server, caplog):
    caplog.set_level(logging.INFO)
    limits = {"max_num_seqs": 1, "queue_timeout": 0.05}
    async with start_server(runner={"step_base_ms": 20}, scheduler=limits) as server:
        first = asyncio.create_task(server.complete(max_tokens=20, ignore_eos=True))
        await asyncio.sleep(0.01)
        await server.complete(max_tokens=3, request_id="late")
        [line] = [line for line in lines(caplog) if line.startswith("late ")]
        assert "ttft=- " in line
        assert line.endswith("finish=timeout")
        await first


async def test_a_path_can_have_no_line_of_its_own(server, caplog):
    caplog.set_level(logging.INFO)
    async with aiohttp.ClientSession() as session:
        url = yarl.URL(f"http://{server.host}:{server.port}/x%0Aforged%1B[31m", encoded=True)
        async with session.get(url) as answer:
            assert answer.status == 404
    [line] = [text for text in caplog.messages if "forged" in text]
    assert line.isprintable()


REFUSED = [
    ("POST", "/v1/completions", {"data": b"{"}, 400),
    ("POST", "/v1/completions", {"json": {"prompt": "O", "max_tokens": -1}}, 400),
    ("POST", "/v1/completions", {"json": {"prompt": "O", "logit_bias": {"999999": 1}}}, 400),
    ("POST", "/v1/messages", {"json": {"max_tokens": 1}}, 400),
    ("POST", "/v1/completions", {"data": b"{}", "headers": {"Content-Type": "text/x"}}, 415),
    ("POST", "/health", {}, 405),
    ("GET", "/nowhere", {}, 404),
    ("GET", "/nowhere", {"headers": {"X-Request-Id": "trace-17"}}, 404),
    ("GET", "/nowhere", {"headers": {"Host": "evil.example"}}, 403),
]


async def test_what_is_refused_has_an_id_that_finds_its_line(server, caplog):
    caplog.set_level(logging.INFO)
    for method, path, options, status in REFUSED:
        answer = await server.request(method, path, **options)
        request_id = answer.headers["X-Request-Id"]
        assert answer.status == status
        [line] = [line for line in caplog.messages if request_id in line]
        assert f": HTTP {status} after " in line


async def test_a_failure_of_ours_has_an_id_that_finds_its_traceback(server, monkeypatch, caplog):
    def fail(*_, **__):
        raise ValueError("mine")

    monkeypatch.setattr(server.front.adapters, "check_name", fail)
    answer = await server.get("/v1/models/x")
    assert answer.status == 500
    [record] = [record for record in caplog.records if record.exc_info]
    assert answer.headers["X-Request-Id"] in record.getMessage()


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
async def test_nothing_of_a_prompt_is_logged_unless_asked(route, start_server, caplog):
    caplog.set_level(logging.DEBUG)
    body = {"prompt": SECRET} if route == "/v1/completions" else {}
    body = body or {"messages": [{"role": "user", "content": SECRET}]}
    for is_asked in (False, True):
        async with start_server(server={"log_prompts": is_asked}) as server:
            await server.request("POST", route, json=body | {"max_tokens": 3})
            await server.request("POST", route, json=body | {"max_tokens": -3})
        told = [r.getMessage() for r in caplog.records if r.name.startswith("aioserve.")]
        assert any(SECRET in line for line in told) == is_asked


async def test_a_long_prompt_is_cut_in_the_log(start_server, caplog):
    caplog.set_level(logging.INFO)
    async with start_server(server={"log_prompts": True}) as server:
        await server.complete("x" * 20_000, max_tokens=1)
    assert any("... (20002 characters)" in line and len(line) < 10_200 for line in lines(caplog))


def test_json_lines_hold_fields_and_tracebacks():
    formatter = JsonFormatter("worker-1")
    record = logging.LogRecord("a.b", logging.INFO, "f.py", 1, "%s\n%d", ("x", 3), None)
    record.fields = {"request_id": "r", "ttft": None}
    line = formatter.format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert told.pop("time").endswith("Z")
    assert told == {
        "level": "info",
        "logger": "a.b",
        "process": "worker-1",
        "message": "x\n3",
        "request_id": "r",
        "ttft": None,
    }
    try:
        raise ValueError("no")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: no" in json.loads(formatter.format(record))["traceback"]


@pytest.mark.parametrize(
    ("words", "process_name"),
    [
        ((), "engine"),
        pytest.param(("--api-workers", "1"), "worker-0", marks=pytest.mark.dist),
    ],
)
def test_every_line_of_a_server_is_json_if_asked(words, process_name):
    command = (sys.executable, "-m", "aioserve", "--port", "0", "--runner", "simulated")
    with started(*command, "--log-format", "json", *words, stderr=subprocess.PIPE) as process:
        for line in process.stderr:
            message = json.loads(line)["message"]
            if message.startswith("listening on "):
                url = message.split()[2]
                break
        body = json.dumps({"prompt": "Hello", "max_tokens": 2, "ignore_eos": True}).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=PATIENCE):
            pass
        process.terminate()
        told = [json.loads(line) for line in process.stderr]
    [line] = [line for line in told if "finish" in line]
    assert (line["process"], line["output_tokens"], line["finish"]) == (process_name, 2, "length")
    assert line["client"] == "127.0.0.1"
