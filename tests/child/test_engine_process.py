"""An engine in a process of its own: asked by calls that block, told in words of its end, and never
left behind.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest

from aioserve import AsyncClient, AsyncEngine, EngineConfig, EngineProcess, SamplingParams
from aioserve.config import AccessConfig, ModelConfig, RunnerConfig, SchedulerConfig, ServerConfig
from aioserve.errors import (
    ConfigError,
    EngineDeadError,
    EngineStartError,
    ForeignLoopError,
    PromptsFailedError,
    RequestError,
)
from aioserve.outputs import FinishReason
from tests.processes import PATIENCE, started, until
from tests.slow import mostly_slow

SIMULATED = EngineConfig(
    runner=RunnerConfig(
        runner="simulated", step_base_ms=1, step_prefill_token_us=1, step_decode_us=1
    )
)
EMBEDDED = EngineConfig(model=ModelConfig(dtype="float32"))
SHORT = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0)
ENDLESS = SamplingParams(max_tokens=3000, ignore_eos=True)
CHAT = [{"role": "user", "content": "Who's there?"}]


def is_alive(pid: int) -> bool:
    """Whether a process runs; a dead one that nobody has asked after yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def gauge(engine: EngineProcess, name: str) -> float:
    """A number of the engine's metrics."""

    async def get() -> str:
        connector = aiohttp.UnixConnector(engine.base_url.removeprefix("unix:"))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get("http://localhost/metrics") as response,
        ):
            return await response.text()

    lines = asyncio.run(get()).splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def num_running(engine: EngineProcess) -> float:
    return gauge(engine, "aioserve_num_requests_running")


@pytest.fixture(scope="module")
def engine():
    with EngineProcess(SIMULATED) as engine:
        yield engine


@pytest.mark.slow
def test_its_texts_are_those_of_an_engine_in_this_process():
    async def here():
        async with AsyncEngine(EMBEDDED) as engine:
            return await engine.generate_all(["What news?", CHAT], SHORT)

    with EngineProcess(EMBEDDED) as engine:
        there = engine.generate_all(["What news?", CHAT], SHORT)
        deltas = list(engine.generate("What news?", SHORT))
        one = engine.generate_one(CHAT, SHORT)
    expected = [output.token_ids for output in asyncio.run(here())]
    assert [output.token_ids for output in there] == expected
    assert [token for delta in deltas for token in delta.token_ids] == expected[0]
    assert deltas[-1].finished
    assert one.token_ids == expected[1]
    assert one.times.to_first_token > 0


def test_calls_of_several_threads_run_together(engine):
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(engine.generate_one, "Hello", params) for _ in range(4)]
        until(lambda: num_running(engine) == 4, "four at once")
        assert [len(call.result(PATIENCE).token_ids) for call in calls] == [300] * 4


def test_leaving_a_stream_aborts_its_request(engine):
    for output in engine.generate("Hello", ENDLESS):
        assert not output.finished
        break
    until(lambda: num_running(engine) == 0, "the end of the request")


def test_an_interrupted_call_aborts_its_request(engine):
    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            engine.generate_all(["Hello"] * 20, ENDLESS, max_concurrency=2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    until(lambda: num_running(engine) == 0, "the end of the requests")


def test_what_is_wrong_is_raised_as_by_an_engine(engine):
    with pytest.raises(RequestError):
        engine.generate_one([10**6])
    with pytest.raises(PromptsFailedError) as caught:
        engine.generate_all(["Hello", [10**6]], SHORT)
    assert list(caught.value.errors) == [1]


def test_an_async_program_asks_it_by_its_address(engine):
    async def ask():
        async with AsyncClient(engine.base_url) as client:
            return await client.generate_one("Hello", SHORT)

    assert len(asyncio.run(ask()).token_ids) == 8


def test_its_socket_is_in_a_folder_that_others_cannot_open(engine):
    folder = Path(engine.base_url.removeprefix("unix:")).parent
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_fork_is_told_to_start_its_own(engine):
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            try:
                engine.generate_one("Hello", SHORT)
            except ForeignLoopError:
                os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_what_the_engine_logs_is_logged_here_by_the_same_loggers(caplog):
    caplog.set_level(logging.INFO)
    with EngineProcess(SIMULATED) as engine:
        engine.generate_one("Hello", SHORT, request_id="find-me")
        url = engine.base_url
    listening = [record for record in caplog.records if f"listening on {url}" in record.message]
    assert [(r.name, r.levelname) for r in listening] == [("aioserve.server.app", "INFO")]
    assert any("find-me" in message for message in caplog.messages)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EngineConfig(scheduler=SchedulerConfig(policy="no-such-policy")), "no-such-policy"),
        pytest.param(
            EngineConfig(model=ModelConfig(model="/no/such/model")),
            "/no/such/model",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            EngineConfig(server=ServerConfig(port=9000)),
            r"server\.port is 9000, which has no effe",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["policy", "model", "port"],
)
def test_settings_that_cannot_work_are_told_by_the_start(config, words):
    engine = EngineProcess(config)
    with pytest.raises(ConfigError, match=words):
        engine.start()
    with pytest.raises(EngineDeadError):
        engine.generate_one("Hello")
    with pytest.raises(EngineStartError, match="after close"):
        engine.start()


@pytest.mark.parametrize("name", ["api_keys_file", "ssl_certfile"])
def test_settings_of_a_server_for_others_are_refused(name):
    with pytest.raises(ConfigError, match=f"access.{name}"):
        EngineProcess(EngineConfig(access=AccessConfig(**{name: "x"})))


def test_a_killed_process_is_told_in_words_to_all_that_wait():
    with EngineProcess(SIMULATED) as engine, ThreadPoolExecutor(3) as pool:
        one = pool.submit(engine.generate_one, "Hello", ENDLESS)
        deltas = pool.submit(list, engine.generate("Hello", ENDLESS))
        many = pool.submit(engine.generate_all, ["Hello"] * 9, ENDLESS, max_concurrency=2)
        until(lambda: num_running(engine) == 4, "four at once")
        os.kill(engine.pid, signal.SIGKILL)
        words = "the engine's process has ended by SIGKILL"
        for call in (one, deltas):
            with pytest.raises(EngineDeadError, match=words):
                call.result(PATIENCE)
        with pytest.raises(PromptsFailedError, match=f"9 of 9 prompts failed.*{words}"):
            many.result(PATIENCE)
        with pytest.raises(EngineDeadError, match=words):
            engine.generate_one("Hello", SHORT)


@pytest.mark.slow
def test_closing_lets_calls_of_other_threads_end_and_leaves_nothing():
    threads = set(threading.enumerate())
    engine = EngineProcess(SIMULATED)
    with pytest.raises(EngineDeadError, match="has not been started"):
        engine.generate_one("Hello")
    engine.start()
    with pytest.raises(EngineStartError, match="called before"):
        engine.start()
    pid, folder = engine.pid, Path(engine.base_url.removeprefix("unix:")).parent
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate_one, "Hello", long)
        until(lambda: num_running(engine) == 1, "the request")
        engine.close()
        assert len(call.result(PATIENCE).token_ids) == 400
    engine.close()
    assert not is_alive(pid)
    assert not folder.exists()
    assert set(threading.enumerate()) == threads
    with pytest.raises(EngineDeadError, match="ended by close"):
        engine.generate_one("Hello")
    with pytest.raises(EngineDeadError, match="ended by close"):
        next(engine.generate("Hello"))


def test_one_that_is_dropped_without_close_leaves_no_thread_and_no_process():
    before = set(threading.enumerate())
    engine = EngineProcess(SIMULATED)
    engine.start()
    pid = engine.pid
    assert engine.generate_one("x", SHORT).finish_reason is FinishReason.LENGTH
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        del engine
        gc.collect()
    assert [str(one.message) for one in told] == [f"subprocess {pid} is still running"]
    until(lambda: not set(threading.enumerate()) - before, "its threads end")
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: not stat.exists() or stat.read_text().split()[2] == "Z", "its process ends")


def test_closing_ends_calls_that_do_not_end_in_time():
    config = EngineConfig(runner=SIMULATED.runner, server=ServerConfig(drain_timeout=0))
    endless = SamplingParams(max_tokens=15_000, ignore_eos=True)
    with ThreadPoolExecutor(2) as pool, EngineProcess(config) as engine:
        calls = [pool.submit(engine.generate_one, "Hello", endless) for _ in range(2)]
        stream = engine.generate("Hello", endless)  # between two of its deltas
        next(stream)
        until(lambda: num_running(engine) == 3, "the requests")
        engine.close()
        for call in calls:
            assert call.result(PATIENCE).finish_reason is FinishReason.ABORT
        with pytest.raises(EngineDeadError):
            list(stream)


@pytest.mark.slow
def test_a_thread_that_asks_on_and_on_is_told_of_the_close():
    config = EngineConfig(runner=SIMULATED.runner, server=ServerConfig(drain_timeout=0))
    engine = EngineProcess(config)
    engine.start()

    def ask():
        while True:
            engine.generate_one("Hello", SHORT)

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(ask) for _ in range(4)]
        until(lambda: gauge(engine, "aioserve_generation_tokens_total") > 100, "replies")
        engine.close()
        for call in calls:
            with pytest.raises(EngineDeadError):
                call.result(PATIENCE)


PROGRAM = """
import os, sys
from aioserve import EngineConfig, EngineProcess
from aioserve.config import RunnerConfig
engine = EngineProcess(EngineConfig(runner=RunnerConfig(runner="simulated")))
engine.start()
deltas = engine.generate("Hello")
next(deltas)
print(engine.pid, engine.base_url, flush=True)
{end}
"""


@pytest.mark.parametrize(
    "end",
    mostly_slow(
        ["os._exit(0)", "sys.exit(0)", "del deltas, engine; sys.stdin.read()"],
        but=["os._exit(0)"],
    ),
    ids=["dies", "forgets", "lets_go"],
)
def test_the_engine_ends_with_its_program_however_that_ends(end):
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    with started(*command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as program:
        pid, url = program.stdout.readline().split()
        until(lambda: not is_alive(int(pid)), "the end of the engine's process")
        folder = Path(url.removeprefix("unix:")).parent
        until(lambda: not folder.exists(), "the end of its folder")
        program.stdin.close()
        program.wait(PATIENCE)
