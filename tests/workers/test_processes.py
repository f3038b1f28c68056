"""A server of several processes: what it answers, and what becomes of it when one of them dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import psutil
import pytest

from tests.processes import PATIENCE, read_lines, run, serving, started, until
from tests.test_cli import MORTAL, fetch, start_stream

SIMULATED = ["--runner", "simulated", "--step-base-ms", "5"]
TWO = [*SIMULATED, "--api-workers", "2"]


def workers_of(process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def gauges(url: str) -> dict[str, str]:
    lines = fetch(f"{url}/metrics")[1].decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def is_idle(url: str) -> bool:
    found = gauges(url)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_used_blocks")
    return all(float(found[f"aioserve_{name}"]) == 0 for name in names)


def test_a_worker_serves_and_ends_with_the_server():
    with serving(*SIMULATED, "--api-workers", "1") as (process, url):
        [worker] = workers_of(process)
        assert fetch(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 2})[0] == 200
        with start_stream(url, max_tokens=50) as response:
            process.send_signal(signal.SIGTERM)
            assert response.read().endswith(b"data: [DONE]\n\n")
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "Traceback" not in stderr
        assert not worker.is_running()


@pytest.mark.dist
def test_no_connection_is_lost_or_refused_once_the_server_has_said_that_it_is_ready():
    command = [sys.executable, "-m", "aioserve", "serve", "--port", "0", *TWO]
    with started(*command, stderr=subprocess.PIPE) as process, ThreadPoolExecutor(4) as threads:
        for line in process.stderr:
            if "/ready says when the model is loaded" in line:
                break
        read_lines(process)
        url = next(word for word in line.split() if word.endswith("/ready"))
        is_ready = threading.Event()  # as somebody has heard

        def ask() -> list[int | None]:
            """The statuses of connections that began after that."""
            statuses: list[int | None] = []
            while len(statuses) < 50 and process.poll() is None:
                is_after = is_ready.is_set()
                try:
                    status = fetch(url)[0]
                except (OSError, HTTPException):
                    status = None
                if status == 200:
                    is_ready.set()
                if is_after:
                    statuses.append(status)
            return statuses

        for asking in [threads.submit(ask) for _ in range(4)]:
            assert asking.result(timeout=PATIENCE) == [200] * 50


@pytest.mark.dist
def test_a_signal_while_workers_start_ends_the_server_at_once(tmp_path):
    environment = workers_begin_with("import time; time.sleep(1000)", tmp_path)
    command = [sys.executable, "-m", "aioserve", "serve", "--port", "0", *TWO]
    with started(*command, stderr=subprocess.PIPE, env=environment) as process:
        until(lambda: len(workers_of(process)) == 2, "the workers are started")
        workers = workers_of(process)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=PATIENCE)
        assert (process.returncode, "Traceback" in stderr) == (0, False), stderr
        assert not any(worker.is_running() for worker in workers)


BODIES = [
    ("completions", {"prompt": "O Romeo", "max_tokens": 12, "temperature": 0, "logprobs": 2}),
    ("completions", {"prompt": ["O", "Who"], "max_tokens": 9, "n": 2, "seed": 3, "stop": "e"}),
    ("completions", {"prompt": "O", "max_tokens": 9, "seed": 3, "n": 1, "best_of": 3}),
    ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "seed": 4}),
    ("responses", {"input": "Speak", "max_output_tokens": 16, "temperature": 0}),
    ("messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "model": "x"}),
    ("embeddings", {"input": ["one", "two"], "model": "embedded"}),
    ("completions", {"prompt": "O", "max_tokens": -1}),
    ("completions", {"prompt": "O", "structured_outputs": {"regex": "("}}),
]
OF_THIS_ANSWER = ("id", "created", "created_at", "item_id")


def told(body: bytes) -> object:
    """Without what no two answers share."""

    def strip(value):
        if isinstance(value, dict):
            return {k: strip(v) for k, v in value.items() if k not in OF_THIS_ANSWER}
        return [strip(item) for item in value] if isinstance(value, list) else value

    return strip(json.loads(body))


@pytest.mark.dist
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--pipeline-depth 2 --shadow-policy fcfs --decision-log log",
        "--pipeline-depth 2 --kv-connector memory --num-kv-blocks 64",
    ],
    ids=["plain", "watched", "kv connector"],
)
def test_answers_are_those_of_one_process(flags, tmp_path):
    words = [str(tmp_path / word) if word == "log" else word for word in flags.split()]
    answers = []
    for workers in ("0", "2"):
        with serving("--api-workers", workers, "--enable-admin", *words) as (_, url):
            own = [fetch(f"{url}/v1/{path}", body) for path, body in BODIES]
            answers.append([(status, told(body)) for status, body in own])
            stored = json.loads(own[4][1])["id"]
            for _ in range(8):  # new connections: both workers are asked
                status, body = fetch(f"{url}/v1/responses/{stored}")
                assert (status, json.loads(body)["id"]) == (200, stored)
    for one, other in zip(*answers, strict=True):
        assert one == other


def read_stream(url: str, has_begun: threading.Semaphore) -> bytes:
    """All of a stream; what there was of it if its server broke off."""
    response = start_stream(url, max_tokens=1000)
    has_begun.release()
    lines = b""
    try:
        with response:
            for line in response:
                lines += line
    except (OSError, HTTPException):
        pass
    return lines


@pytest.mark.dist
def test_a_worker_that_hangs_is_ended_and_comes_again():
    with serving(*TWO, "--worker-timeout", "5") as (process, url):
        hung = workers_of(process)[0]
        hung.suspend()
        until(lambda: not hung.is_running(), "the worker that hangs is ended")
        until(lambda: len(workers_of(process)) == 2, "it is started again")
        until(
            lambda: len([name for name in gauges(url) if "event_loop_lag" in name]) == 3,
            "the worker serves again",
        )
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "has not answered for 5 s (--worker-timeout): it is killed" in stderr


@pytest.mark.dist
@pytest.mark.parametrize("policy", ["chunked_prefill", "tests.testing.pinning:PinsForMoments"])
def test_a_worker_that_is_killed_takes_its_own_requests_along_and_comes_again(policy: str):
    """Also where a policy has pinned their prefixes, for moments."""
    with serving(*TWO, "--policy", policy) as (process, url), ThreadPoolExecutor(12) as threads:
        before = workers_of(process)
        has_begun = threading.Semaphore(0)
        streams = [threads.submit(read_stream, url, has_begun) for _ in range(12)]
        for _ in streams:
            assert has_begun.acquire(timeout=PATIENCE)
        before[0].kill()
        ends = [stream.result().endswith(b"data: [DONE]\n\n") for stream in streams]
        assert set(ends) == {True, False}  # 12 connections do not all meet in one worker
        until(lambda: len(workers_of(process)) == 2, "the worker is started again")
        until(lambda: is_idle(url), "its blocks are free")
        until(
            lambda: len([name for name in gauges(url) if "event_loop_lag" in name]) == 3,
            "the worker serves again",
        )
        with start_stream(url, max_tokens=3) as response:
            assert response.read().endswith(b"data: [DONE]\n\n")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        [line] = [line for line in stderr.splitlines() if "has ended with exit code -9" in line]
        assert f"its {ends.count(False)} requests are aborted" in line


@pytest.mark.dist
def test_an_engine_that_is_killed_is_told_to_every_client_and_leaves_no_process():
    with serving(*TWO) as (process, url):
        workers = workers_of(process)
        with start_stream(url, max_tokens=4000) as response:
            process.kill()
            assert b"the engine has died: its process has ended" in response.read()
        until(lambda: not any(worker.is_running() for worker in workers), "all have ended")


@pytest.mark.dist
def test_an_engine_that_dies_is_told_to_every_client_and_ends_with_exit_code_3(tmp_path):
    (tmp_path / "mortal.py").write_text(MORTAL)
    policy = f"{tmp_path / 'mortal.py'}:Mortal"
    with serving(*TWO, "--policy", policy) as (process, url):
        workers = workers_of(process)
        with start_stream(url, max_tokens=1000) as response:
            assert b"the device is gone" in response.read()
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 3
        assert stderr.splitlines()[-1].startswith("aioserve: error: the engine has died: ")
        assert not any(worker.is_running() for worker in workers)


@pytest.mark.dist
def test_a_second_signal_drops_what_still_runs():
    with serving(*TWO, "--drain-timeout", "300") as (process, url):
        with start_stream(url, max_tokens=4000) as response:
            process.send_signal(signal.SIGINT)
            until(lambda: fetch(f"{url}/ready")[0] == 503, "the server drains")
            assert fetch(f"{url}/v1/completions", {"prompt": "Hello"})[0] == 503
            process.send_signal(signal.SIGINT)
            assert b'"finish_reason":"abort"' in response.read()
        assert process.wait(timeout=PATIENCE) == 0


def workers_begin_with(code: str, folder: Path) -> dict[str, str]:
    """An environment in which every worker, and no other process, first runs `code`."""
    (folder / "sitecustomize.py").write_text(
        f"import sys\nif 'aioserve.fleet.workers.worker' in sys.orig_argv:\n    {code}\n"
    )
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("code", "what", "why"),
    [
        ("import os; os._exit(7)", "", "has ended 3 times before it served, with exit code 7"),
        (
            "import aioserve.support; aioserve.support.__version__ = '0.0.1'",
            "it is version 0.0.1, the engine is",
            "has ended before it served, with exit code 2",
        ),
    ],
    ids=["that die", "of another version"],
)
def test_workers_that_never_serve_end_the_server_with_a_line(code, what, why, tmp_path):
    environment = workers_begin_with(code, tmp_path)
    result = run(sys.executable, "-m", "aioserve", "--port", "0", *TWO, env=environment)
    assert (result.returncode, "Traceback" in result.stderr) == (1, False)
    assert what in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("aioserve: error: worker-")
    assert why in last


@pytest.mark.dist
def test_two_servers_do_not_share_a_port():
    with serving(*TWO) as (_, url):
        port = url.rpartition(":")[2]
        result = run(sys.executable, "-m", "aioserve", *TWO, "--port", port)
        assert result.returncode == 2
        assert "address already in use" in result.stderr.splitlines()[-1].lower()
        assert urllib.request.urlopen(f"{url}/health", timeout=PATIENCE).status == 200


def ask_unix(path: Path, key: str, target: str = "/v1/models") -> int:
    """The status, by a connection of its own."""
    connection = HTTPConnection("x")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    try:
        connection.request("GET", target, headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.dist
def test_workers_share_a_unix_socket_and_keys_which_a_signal_has_read_again(tmp_path):
    path, keys = tmp_path / "a.sock", tmp_path / "keys"
    keys.write_text("sk-ann-0123456789\n")
    command = [sys.executable, "-m", "aioserve", "serve", *TWO, "--api-keys-file", str(keys)]
    environ = {**os.environ, "AIOSERVE_API_KEYS": "sk-ben-0123456789"}
    with started(*command, "--uds", str(path), stderr=subprocess.PIPE, env=environ) as process:
        log = []
        for line in process.stderr:
            log.append(line)
            if f"listening on unix:{path}" in line:
                break
        for worker in workers_of(process):
            assert "AIOSERVE_API_KEYS" not in worker.environ()
        for _ in range(8):  # some go to each
            assert ask_unix(path, "sk-ann-0123456789") == 200
            assert ask_unix(path, "sk-ben-0123456789") == 200
            assert ask_unix(path, "sk-carl-0123456789") == 401
        keys.write_text("sk-carl-0123456789\n")
        process.send_signal(signal.SIGHUP)
        until(
            lambda: [ask_unix(path, "sk-carl-0123456789") for _ in range(8)] == [200] * 8,
            "the new key is known",
        )
        assert ask_unix(path, "sk-ann-0123456789") == 401
        keys.write_text("two words")
        process.send_signal(signal.SIGHUP)
        assert ask_unix(path, "sk-carl-0123456789") == 200
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
    assert "must be printable ASCII characters without spaces; what was set before" in rest
    assert not path.exists()
    assert "sk-" not in "".join(log) + rest
