"""A loop that stands still and a step that does not come back are noticed from outside, and said
with the line that is to blame. An engine that is embedded ends no process.
"""

import asyncio
import bdb
import faulthandler
import inspect
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig, ServerConfig
from aioserve.engine import watchdog
from aioserve.engine.operations import HealthCheck
from aioserve.engine.watchdog import LoopMonitor, is_debugged
from aioserve.errors import EngineDeadError
from aioserve.model_source.info import ModelInfo
from aioserve.runner.simulated import SimulatedRunner
from aioserve.scheduler.output import SchedulerOutput
from policies.fcfs import FCFSScheduler
from tests.processes import PATIENCE, started

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)
RUNNER = RunnerConfig(runner="simulated", step_base_ms=0.5)


class Listener(logging.Handler):
    """Keeps lines of the watchdog, and calls what waits for one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.on_line: Callable[[], None] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.on_line()

    def find(self, text: str) -> str:
        """The line with this text."""
        (line,) = (line for line in self.lines if text in line)
        return line


@pytest.fixture
def log() -> Iterator[Listener]:
    listener, logger = Listener(), logging.getLogger(watchdog.__name__)
    logger.addHandler(listener)
    yield listener
    logger.removeHandler(listener)


class Looping(FCFSScheduler):
    """Loops in its first step until it is let go: the likeliest slip in a policy."""

    may_go_on = threading.Event()

    def schedule(self) -> SchedulerOutput:
        give_up = time.monotonic() + PATIENCE
        while not self.may_go_on.is_set() and time.monotonic() < give_up:
            len(self.waiting)  # this line, or its neighbour, is to blame
        return super().schedule()


async def test_a_policy_that_loops_is_named_with_its_line(log: Listener) -> None:
    Looping.may_go_on.clear()
    log.on_line = Looping.may_go_on.set
    config = EngineConfig(
        runner=RUNNER,
        scheduler=SchedulerConfig(policy=f"{__name__}:Looping"),
        server=ServerConfig(hung_loop_seconds=0.1, dead_loop_seconds=0.2),
    )
    async with AsyncEngine(config) as engine:
        outputs = [o async for o in engine.generate([5, 6, 7], SHORT)]
        assert outputs[-1].finish_reason == "length"  # and it goes on
        while len(log.lines) < 2:  # noqa: ASYNC110 - it has turned long ago
            await asyncio.sleep(0.01)
    line = log.find("has not turned for")
    source, first = inspect.getsourcelines(Looping)
    loop = next(n for n, text in enumerate(source, first) if "while not" in text)
    places = [f"policy Looping is at {__file__}:{n}, in schedule()" for n in (loop, loop + 1)]
    assert any(place in line for place in places), line
    assert "core.py" in line  # the whole stack
    assert log.lines[-1] == "the event loop turns again"


class StuckRunner(SimulatedRunner):
    """From the second step on each waits, on the runner's thread, until it is let go."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, ModelInfo(config.model))
        self.config = config
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="aioserve-runner")
        self.may_go_on = threading.Event()
        self.num_steps = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> "asyncio.Future[Any]":
        future = super().execute_model(scheduler_output)
        self.num_steps += 1
        return future if self.num_steps == 1 else asyncio.ensure_future(self._late(future))

    async def _late(self, future: "asyncio.Future[Any]") -> Any:
        await asyncio.get_running_loop().run_in_executor(self.thread, self.sleep_on)
        return await future

    def sleep_on(self) -> None:
        self.may_go_on.wait(PATIENCE)


@pytest.fixture
def stuck() -> Iterator[Callable[..., StuckRunner]]:
    made: list[StuckRunner] = []

    def make(**server: float | None) -> StuckRunner:
        made.append(StuckRunner(EngineConfig(runner=RUNNER, server=ServerConfig(**server))))
        return made[-1]

    yield make
    for runner in made:
        runner.may_go_on.set()
        runner.thread.shutdown()


async def test_a_step_that_never_comes_back_fails_requests_and_no_process(
    log: Listener, stuck: Callable[..., StuckRunner]
) -> None:
    runner = stuck(hung_step_seconds=0.1, dead_step_seconds=0.4)
    async with AsyncEngine(runner.config, runner=runner) as engine:
        with pytest.raises(EngineDeadError, match="a step has not come back from the runner"):
            async for _ in engine.generate([5, 6, 7], SHORT):
                pass
        assert "sleep_on" in log.find("what computes it")  # the stack of the runner's thread
        health = await engine.ask(HealthCheck())
        assert health.status == "dead"
        with pytest.raises(EngineDeadError):
            await engine.add_request([5, 6, 7], SHORT)
    assert not runner.may_go_on.is_set()  # the end of the engine did not wait for the thread


async def test_a_slow_step_is_said_and_nothing_else_happens(
    log: Listener, stuck: Callable[..., StuckRunner]
) -> None:
    runner = stuck(hung_step_seconds=0.1)
    log.on_line = runner.may_go_on.set
    async with AsyncEngine(runner.config, runner=runner) as engine:
        outputs = [o async for o in engine.generate([5, 6, 7], SHORT)]
        assert outputs[-1].finish_reason == "length"
        while len(log.lines) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "sleep_on" in log.lines[0]
    assert log.lines[1] == "the step that hung has come back"


def test_a_debugger_that_holds_a_thread_is_no_hang() -> None:
    assert not is_debugged(sys._getframe())
    assert bdb.Bdb().runcall(lambda: is_debugged(sys._getframe()))


# A program that holds the lock for longer than a server may, and goes on.
EMBEDDED = """
import asyncio, ctypes
from aioserve import AsyncEngine, EngineConfig
from aioserve.config import RunnerConfig, ServerConfig

server = ServerConfig(hung_loop_seconds=0.1, dead_loop_seconds=0.1)
config = EngineConfig(runner=RunnerConfig(runner="simulated"), server=server)


async def main():
    async with AsyncEngine(config):
        await asyncio.sleep(0.2)
        ctypes.PyDLL(None).usleep(2_500_000)
        print("goes on")


asyncio.run(main())
"""

# What a process without timers of the C library has instead.
WITHOUT_TIMERS = """
import ctypes, time
from aioserve.engine.lock_guard import GRACE_SECONDS, LockGuard

closed = LockGuard(0.1 - GRACE_SECONDS, has_timers=False)
closed.close()
time.sleep(0.2)
guard = LockGuard(1.5 - GRACE_SECONDS, has_timers=False)
for _ in range(4):  # together longer than the guard waits, each one much shorter
    time.sleep(0.4)
    guard.renew()
print("renewed", flush=True)
ctypes.PyDLL(None).usleep(60_000_000)
"""


@pytest.mark.slow
def test_an_embedded_engine_never_ends_the_program_that_holds_the_lock() -> None:
    with started(sys.executable, "-c", EMBEDDED, stdout=subprocess.PIPE) as process:
        said, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said) == (0, "goes on\n")


async def test_an_embedded_engine_leaves_signals_alone() -> None:
    server = ServerConfig(hung_loop_seconds=0.1, dead_loop_seconds=0.1)
    async with AsyncEngine(EngineConfig(runner=RUNNER, server=server)):
        await asyncio.sleep(0.2)
        assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        assert not faulthandler.unregister(signal.SIGALRM)


def test_without_timers_of_the_system_faulthandler_ends_the_process() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(sys.executable, "-c", WITHOUT_TIMERS, **pipes) as process:
        said, stacks = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said) == (1, "renewed\n")
    assert 'File "<string>", line 13 in <module>' in stacks


async def test_an_engine_that_has_ended_is_not_watched() -> None:
    before = set(threading.enumerate())
    async with AsyncEngine(EngineConfig(runner=RUNNER)):
        new = set(threading.enumerate()) - before
        [thread] = [thread for thread in new if thread.name == "aioserve-watchdog"]
    await asyncio.to_thread(thread.join, PATIENCE)
    assert not thread.is_alive()


async def test_a_delay_that_cannot_be_told_does_not_end_the_monitor() -> None:
    told: asyncio.Queue[float] = asyncio.Queue()

    def tell(delay: float) -> None:
        told.put_nowait(delay)
        raise OSError("this delay cannot be told")

    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    monitor = LoopMonitor(lambda: True, tell)
    monitor.start()
    try:
        for _ in range(2):
            await asyncio.wait_for(told.get(), PATIENCE)
    finally:
        monitor.stop()
    assert [str(error["exception"]) for error in errors] == ["this delay cannot be told"] * 2
