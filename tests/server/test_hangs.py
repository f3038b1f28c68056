"""Whatever hangs in a server, its process ends: by itself, or by signals."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress

import pytest

from aioserve.engine.lock_guard import GRACE_SECONDS
from tests.processes import JSON, PATIENCE, serving, started
from tests.slow import mostly_slow

SIMULATED = ("--runner", "simulated", "--step-base-ms", "0.5")

# A policy file runs in the server's process.
LOOPING = """
from aioserve.policies.fcfs import FCFSScheduler


class Looping(FCFSScheduler):
    def schedule(self):
        while self.waiting:
            len(self.waiting)  # admits nobody
        return super().schedule()
"""
HOLDING = """
import re
from aioserve.policies.fcfs import FCFSScheduler


class Holding(FCFSScheduler):
    def schedule(self):
        if self.waiting:
            re.search("(a|a)*$", "a" * 100 + "b")  # C code that never gives up the lock
        return super().schedule()
"""
STUCK = """
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
from aioserve.policies.fcfs import FCFSScheduler
from aioserve.runner.simulated import SimulatedRunner

thread = ThreadPoolExecutor(1, thread_name_prefix="aioserve-runner")
execute = SimulatedRunner.execute_model


def sleep_on():
    threading.Event().wait()


def execute_model(runner, step):
    if step.step_id < 5:
        return execute(runner, step)
    return asyncio.get_running_loop().run_in_executor(thread, sleep_on)


async def close(runner):  # as those that compute do
    await asyncio.get_running_loop().run_in_executor(thread, int)


class Stuck(FCFSScheduler):
    SimulatedRunner.execute_model, SimulatedRunner.close = execute_model, close
"""
LOADING = """
import asyncio, threading
from concurrent.futures import ThreadPoolExecutor
from aioserve.policies.fcfs import FCFSScheduler
from aioserve.runner.simulated import SimulatedRunner


async def load(runner):
    thread = ThreadPoolExecutor(1, thread_name_prefix="aioserve-runner")
    print("loads", flush=True)
    await asyncio.get_running_loop().run_in_executor(thread, threading.Event().wait)


async def close(runner):
    await asyncio.Event().wait()


class Loading(FCFSScheduler):
    SimulatedRunner.load, SimulatedRunner.close = load, close
"""


@pytest.fixture
def policy(tmp_path):
    """Writes a policy file; returns the flags that name it."""

    def write(text):
        name = text.partition("class ")[2].partition("(")[0]
        (tmp_path / "mine.py").write_text(text)
        return ("--policy", f"{tmp_path / 'mine.py'}:{name}")

    return write


@contextmanager
def asked(url):
    """A stream that is asked for on a thread: what was answered is there after the block.

    A request that is refused comes before it: what the first one loads holds the loop up.
    """
    refused = urllib.request.Request(f"{url}/v1/completions", b'{"prompt": {}}', JSON)
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(refused, timeout=PATIENCE)
    body = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), JSON)
    answer = []

    def read():
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                answer.extend(response)
        except OSError as error:  # the connection has ended with the process
            answer.append(str(error).encode())

    thread = threading.Thread(target=read)
    thread.start()
    yield answer
    thread.join()


def fill_stderr_of(process):
    """From here on the pipe that is its stderr takes nothing more, and nothing is read of it."""
    pipe = os.open(f"/proc/{process.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(pipe, b"x")
    os.close(pipe)


def read_until(process, text):
    """Lines of its log up to one with this text."""
    said = ""
    for line in process.stderr:
        said += line
        if text in line:
            return said
    raise AssertionError(said)


def test_a_policy_that_loops_for_ever_is_named_and_ends_the_process(policy):
    bounds = ("--hung-loop-seconds", "0.5", "--dead-loop-seconds", "1")
    with serving(*SIMULATED, *policy(LOOPING), *bounds) as (process, url):
        with asked(url) as answer:
            _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 3
        assert answer  # the client has an end
        found = re.search(r"policy Looping is at \S*mine.py:(\d+), in schedule", said)
        assert found
        assert "self.waiting" in LOOPING.splitlines()[int(found[1]) - 1]
        assert "the process ends now, exit code 3" in said


def test_c_code_that_never_gives_up_the_lock_ends_the_process_with_its_stack(policy):
    """No thread of Python's runs, and no signal handler: the system alone can end it."""
    bounds = ("--hung-loop-seconds", "0.5", "--dead-loop-seconds", "1")
    with serving(*SIMULATED, *policy(HOLDING), *bounds) as (process, url):
        with asked(url) as answer:
            _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == -signal.SIGALRM
        assert answer  # the client has an end
        before, said, stacks = said.partition("no Python code has run for 1 s")
        assert said
        assert "has not turned" not in before
        found = re.search(r'mine.py", line (\d+) in schedule', stacks)
        assert "re.search" in HOLDING.splitlines()[int(found[1]) - 1]


@pytest.mark.slow
def test_a_full_pipe_holds_up_no_end_of_c_code_that_never_gives_up_the_lock(policy):
    bounds = ("--hung-loop-seconds", "0.2", "--dead-loop-seconds", "0.4")
    with serving(*SIMULATED, *policy(HOLDING), *bounds) as (process, url):
        fill_stderr_of(process)
        with asked(url):
            assert process.wait(PATIENCE) == -signal.SIGALRM


@pytest.mark.slow
def test_a_server_that_was_stopped_as_a_whole_goes_on(policy):
    bounds = ("--hung-loop-seconds", "0.5", "--dead-loop-seconds", "1")
    with serving(*SIMULATED, *bounds) as (process, url):
        time.sleep(1.5)  # the guard is set with the first look
        process.send_signal(signal.SIGSTOP)
        time.sleep(2 * GRACE_SECONDS)
        process.send_signal(signal.SIGCONT)
        time.sleep(2 * GRACE_SECONDS)
        with urllib.request.urlopen(f"{url}/livez", timeout=PATIENCE) as response:
            assert response.status == 200


def test_a_runner_that_never_comes_back_ends_streams_and_the_process(policy):
    bounds = ("--hung-step-seconds", "0.2", "--dead-step-seconds", "0.6")
    with serving(*SIMULATED, *policy(STUCK), *bounds) as (process, url):
        with asked(url) as answer:
            _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 3
        assert b"a step has not come back from the runner" in b"".join(answer)
        assert "sleep_on" in said  # the stack of the runner's thread
        assert "Traceback" not in said.partition("has died")[0]


@pytest.mark.parametrize("count", mostly_slow([1, 2, 3], but=[3]))
def test_signals_end_a_server_whose_loop_stands_still(policy, count):
    bounds = ("--hung-loop-seconds", "0.1", "--drain-timeout", "0.1")
    with serving(*SIMULATED, *policy(LOOPING), *bounds) as (process, url):
        with asked(url):
            read_until(process, "has not turned")
            process.send_signal(signal.SIGTERM)
            for _ in range(count - 1):
                read_until(process, "interrupted")
                process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 3
        assert "the process ends now, exit code 3" in said


@pytest.mark.slow
def test_one_signal_ends_a_server_whose_runner_never_comes_back(policy):
    bounds = ("--hung-step-seconds", "0.1", "--drain-timeout", "0.1")
    with serving(*SIMULATED, *policy(STUCK), *bounds) as (process, url):
        with asked(url) as answer:
            read_until(process, "has not come back")
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE)
        assert process.returncode == 3
        assert b'"finish_reason":"abort"' in b"".join(answer)


def test_one_signal_ends_a_server_that_loads_whatever_its_threads_are_at(policy):
    command = (sys.executable, "-m", "aioserve", "serve", "--port", "0")
    with started(
        *(*command, *SIMULATED, *policy(LOADING)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == "loads\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "interrupted while the model is being loaded: the server ends" in said
        assert not re.search("ERROR|CRITICAL|Traceback|thread", said), said


@pytest.mark.parametrize(
    "number", mostly_slow([signal.SIGINT, signal.SIGTERM], but=[signal.SIGTERM])
)
def test_the_second_signal_ends_a_server_that_loads(policy, number):
    command = (sys.executable, "-m", "aioserve", "serve", "--port", "0")
    with started(
        *(*command, *SIMULATED, *policy(LOADING)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == "loads\n"
        process.send_signal(number)
        read_until(process, "interrupted while the model is being loaded: the server ends")
        process.send_signal(number)
        _, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "Traceback" not in said
