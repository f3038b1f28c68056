"""A server whose model lies on two processes: it says what one would, and ends as a whole."""

import asyncio
import json
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from aioserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SpeculationConfig,
)
from tests.models import make_model
from tests.processes import JSON, PATIENCE, serving, until
from tests.server.serving import running

EMBEDDED = Path(__file__).parents[2] / "aioserve" / "model_source" / "embedded"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "Who is there?", "logprobs": 2, **GREEDY},
    {"prompt": ["To be", "Or not to be"], "n": 2, "seed": 5, "max_tokens": 8},
    {"prompt": "A number: ", "structured_outputs": {"regex": "[0-9]{3}-[ab]{4}"}, **GREEDY},
    {"prompt": "Who is there? Nay, answer me: ", "echo": True, "logprobs": 1, **GREEDY},
)
LONG = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model(
        "llama",
        tmp_path_factory.mktemp("model"),
        vocab_size=2048,
        eos_token_id=1,
        attention_bias=True,
        tie_word_embeddings=True,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, path)
    return path


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """The processes of all ranks but the first."""
    children = process.children(recursive=True)
    return [c for c in children if "aioserve.gpu.tensor_parallel.rank_process" in c.cmdline()]


class Served:
    """A server of two ranks, and what it answers."""

    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process, self._url = process, url
        self.others = ranks_of(psutil.Process(process.pid))

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        try:
            with self.open(path, body) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(
            urllib.request.Request(self._url + path, data, JSON), None, PATIENCE
        )

    def stream(self) -> Any:
        """A long one that has begun."""
        response = self.open("/v1/completions", LONG)
        response.readline()
        return response

    def ends(self) -> tuple[int, str]:
        """Its exit code and the end of its log, when nothing of it is left."""
        _, log = self.process.communicate(timeout=PATIENCE)
        until(lambda: not any(process.is_running() for process in self.others), "ranks end")
        return self.process.returncode, log


@contextmanager
def two_ranks(model: Path, *argv: str) -> Iterator[Served]:
    settings = ("--tensor-parallel-size", "2", "--threads", "2", "--dtype", "float32")
    with serving("--model", str(model), *settings, *argv) as (process, url):
        served = Served(process, url)
        assert len(served.others) == 1
        yield served


async def said_by_one(model: Path, **sections: Any) -> list[Any]:
    config = EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32"),
        runner=RunnerConfig(threads=1),
        **sections,
    )
    async with running(config) as server:
        answers = [await server.request("POST", "/v1/completions", json=body) for body in BODIES]
    assert [a.body for a in answers if a.status != 200] == []
    return [answer.json()["choices"] for answer in answers]


def round_off(value: Any) -> Any:
    """What the order of sums may change is left out."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: round_off(own) for key, own in value.items()}
    return [round_off(own) for own in value] if isinstance(value, list) else value


def check_equal_until_killed(served: Served, expected: list[Any]) -> None:
    for body, choices in zip(BODIES, expected, strict=True):
        status, answer = served.ask("/v1/completions", body)
        assert status == 200
        assert round_off(answer["choices"]) == round_off(choices)
    with served.stream() as response:
        served.others[0].kill()
        check_end(response.read())


def check_end(streamed: bytes) -> None:
    *_, last, end = streamed.split(b"\n\n")
    assert end == b""
    error = json.loads(last.strip().removeprefix(b"data: "))["error"]
    assert error["code"] == "engine_unavailable"
    assert "rank 1 of 2: process" in error["message"]
    assert "killed by SIGKILL" in error["message"]


async def killed_here(model: Path) -> None:
    """The first rank is this process, which has imported what takes seconds."""
    expected = await said_by_one(model)
    config = EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32"),
        runner=RunnerConfig(threads=2, tensor_parallel_size=2),
    )
    async with running(config) as server:
        [rank] = ranks_of(psutil.Process())
        for body, choices in zip(BODIES, expected, strict=True):
            answer = await server.request("POST", "/v1/completions", json=body)
            assert answer.status == 200
            assert round_off(answer.json()["choices"]) == round_off(choices)
        async with server.session.post(f"{server.url}/v1/completions", json=LONG) as response:
            await response.content.readline()
            rank.kill()
            check_end(await response.read())
        assert (await server.get("/health")).status == 503
        assert (await server.complete()).status == 503
    assert not ranks_of(psutil.Process())


@pytest.mark.dist
def test_two_ranks_say_what_one_says_until_one_of_them_is_killed(model: Path) -> None:
    asyncio.run(killed_here(model))


@pytest.mark.dist
def test_a_server_of_two_ranks_says_so_and_ends_with_exit_code_3(model: Path) -> None:
    expected = asyncio.run(said_by_one(model))
    with two_ranks(model, "--no-exit-on-dead-engine") as served:
        check_equal_until_killed(served, expected)
        assert served.ask("/health")[0] == 503
        assert served.ask("/v1/completions", BODIES[0])[0] == 503
        served.process.send_signal(signal.SIGTERM)
        code, log = served.ends()
        assert code == 3
        assert "killed by SIGKILL" in log.splitlines()[-1]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("argv", "sections"),
    [
        (("--pipeline-depth", "2"), {}),
        (
            ("--speculative-method", "ngram"),
            {"speculation": SpeculationConfig(speculative_method="ngram")},
        ),
        (
            ("--api-workers", "1", "--kv-cache-dtype", "int8"),
            {"cache": CacheConfig(kv_cache_dtype="int8")},
        ),
    ],
)
def test_so_it_is_with(argv: tuple[str, ...], sections: dict[str, Any], model: Path) -> None:
    expected = asyncio.run(said_by_one(model, **sections))
    with two_ranks(model, "--no-exit-on-dead-engine", *argv) as served:
        check_equal_until_killed(served, expected)


@pytest.mark.dist
def test_a_rank_that_is_killed_while_nobody_asks_ends_the_server(model: Path) -> None:
    with two_ranks(model) as served:
        served.others[0].kill()
        code, log = served.ends()
        assert code == 3
        assert "rank 1 of 2: process" in log.splitlines()[-1]


@pytest.mark.dist
def test_a_rank_that_hangs_ends_the_server_after_the_time_that_is_set(model: Path) -> None:
    with two_ranks(model, "--rank-timeout", "15") as served:
        with served.stream() as response:
            served.others[0].suspend()
            assert b"has not answered for 15 s (runner.rank_timeout)" in response.read()
        code, log = served.ends()
        assert code == 3
        assert "has not answered for 15 s" in log.splitlines()[-1]


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_the_server_and_leaves_no_process_behind(
    number: signal.Signals, model: Path
) -> None:
    with two_ranks(model, "--drain-timeout", "300") as served:
        with served.stream() as response:
            served.process.send_signal(number)
            for other in served.others:  # as whoever stops a whole service does
                other.send_signal(number)
            assert response.read().endswith(b"data: [DONE]\n\n")
        code, log = served.ends()
        assert code == 0
        assert "Traceback" not in log


@pytest.mark.dist
def test_a_server_that_is_killed_leaves_no_process_behind(model: Path) -> None:
    with two_ranks(model) as served, served.stream():
        served.process.kill()
        assert served.ends()[0] == -signal.SIGKILL
