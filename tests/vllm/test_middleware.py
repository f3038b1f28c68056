"""What clients say besides `vllm_xargs` reaches the policy of a real `vllm serve`."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.records import Added
from aioserve.vllm.middleware import HintsMiddleware, with_hints
from tests.vllm.inside import BLOCK_SIZE, MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

NAME = "small"
#: Seconds that a server may take to start and a request to end, on a machine that is busy.
PATIENCE = 900.0


class Server:
    """A real `vllm serve` whose scheduler records what its policy is told."""

    def __init__(self, folder: Path) -> None:
        self.log, self._output = folder / "decisions.log", folder / "output.txt"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        settings = {"aioserve": {"policy": "fair", "decision_log": str(self.log)}}
        flags = {
            "--port": self._port,
            "--served-model-name": NAME,
            "--dtype": "float32",
            "--max-model-len": 256,
            "--block-size": BLOCK_SIZE,
            "--scheduler-cls": "aioserve.vllm.Scheduler",
            "--middleware": "aioserve.vllm.HintsMiddleware",
            "--additional-config": json.dumps(settings),
        }
        words = [str(word) for pair in flags.items() for word in pair]
        vllm = str(Path(sys.executable).with_name("vllm"))
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [vllm, "serve", str(MODEL), "--enforce-eager", *words],
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it serves."""
        for _ in range(int(PATIENCE)):
            assert self._process.poll() is None, self._output.read_text()[-4000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=10):
                    return
            except OSError:
                time.sleep(1.0)
        raise AssertionError(self._output.read_text()[-4000:])

    def post(self, route: str, body: bytes, **headers: str) -> tuple[int, Any]:
        """Send a body; its status and its answer. `_` in the name of a header is a dash."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{route}",
            body,
            {"Content-Type": "application/json"}
            | {name.replace("_", "-"): value for name, value in headers.items()},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def stop(self) -> None:
        """End it and what it started; its log is written then."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(PATIENCE / 10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def completion(prompt: str, **fields: Any) -> bytes:
    return json.dumps({"model": NAME, "prompt": prompt, "max_tokens": 2, **fields}).encode()


def test_user_hints_and_headers_reach_the_policy_of_a_server(server: Server) -> None:
    """The decision log says what the policy was told of each request."""
    sent = {
        "of the field": ({"user": "alice"}, {}),
        "of xargs, which count more": ({"user": "alice", "vllm_xargs": {"user": "bob"}}, {}),
        "of headers": (
            {"hints": {"tier": "gold"}},
            {
                "X_Request_Class": "interactive",
                "X_Request_Timeout": "600",
                "X_Claude_Code_Session_Id": "s1",
                "x_slo_ttft_ms": "250",
            },
        ),
        "of vLLM's own header": ({}, {"X_Session_ID": "s2"}),
        "of nobody": ({}, {}),
    }
    for prompt, (fields, headers) in sent.items():
        status, answer = server.post("/v1/completions", completion(prompt, **fields), **headers)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 2)
    messages = [{"role": "user", "content": "of a chat"}]
    chat = {"model": NAME, "messages": messages, "max_tokens": 2, "user": "carol"}
    assert server.post("/v1/chat/completions", json.dumps(chat).encode())[0] == 200
    for body in (b"{", b"[]", b'"text"', completion("x", user="a", max_tokens="many")):
        assert server.post("/v1/completions", body)[0] in (400, 422)
    status, answer = server.post(
        "/v1/completions", completion("x", user="alice"), X_Request_Timeout="soon"
    )
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    assert "deadline must be seconds above 0" in str(answer["choices"][0]["stop_reason"])
    server.stop()
    log = DecisionLog(server.log)
    seen = [record.spec for record in log if isinstance(record, Added)]
    assert [(spec.user, dict(spec.hints)) for spec in seen] == [
        ("alice", {}),
        ("bob", {}),
        (
            "",
            {"tier": "gold", "slo_class": "interactive", "session": "s1", "slo_ttft": 0.25},
        ),
        ("", {"session": "s2"}),
        ("", {}),
        ("carol", {}),
    ]
    assert [spec.deadline is not None for spec in seen] == [False, False, True, False, False, False]


def heard(path: str, chunks: list[bytes]) -> tuple[list[bytes], dict[bytes, bytes]]:
    """The body that an application behind the middleware reads, in its pieces, and the headers."""
    pieces: list[bytes] = []
    found: dict[bytes, bytes] = {}

    async def application(scope: Any, receive: Any, send: Any) -> None:
        found.update(scope["headers"])
        while True:
            message = await receive()
            pieces.append(message["body"])
            if not message.get("more_body"):
                break
        assert await receive() == {"type": "http.disconnect"}

    messages = [
        {"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks)}
        for i, chunk in enumerate(chunks)
    ]
    messages.append({"type": "http.disconnect"})
    came = iter(messages)

    async def receive() -> Any:
        return next(came)

    async def send(message: Any) -> None:
        raise AssertionError("nothing is sent")

    size = sum(map(len, chunks))
    headers = [(b"content-length", b"%d" % size), (b"x-request-class", b"gold")]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    asyncio.run(HintsMiddleware(application)(scope, receive, send))
    return pieces, found


def test_a_body_that_comes_in_pieces_is_read_whole_and_its_length_told() -> None:
    [body], headers = heard("/v1/completions", [b'{"user"', b': "a"}'])
    assert json.loads(body)["vllm_xargs"] == {"user": "a", "slo_class": "gold"}
    assert headers[b"content-length"] == b"%d" % len(body)


def test_numbers_that_json_lacks_are_no_hints() -> None:
    """A deadline that is none is refused by its name, as a text."""
    headers = [
        (b"X-SLO-TTFT-ms", b"nan"),
        (b"X-SLO-TPOT-ms", b"50"),
        (b"X-Request-Timeout", b"inf"),
    ]
    assert json.loads(with_hints(b"{}", headers))["vllm_xargs"] == {
        "slo_tpot": 0.05,
        "deadline": "inf",
    }


def test_other_routes_and_long_bodies_pass_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [b'{"user"', b': "a"', b"}"]
    assert heard("/v1/embeddings", chunks)[0] == chunks
    monkeypatch.setattr("aioserve.vllm.middleware.MAX_BODY", 10)
    assert heard("/v1/completions", chunks)[0] == chunks
