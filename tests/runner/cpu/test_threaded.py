"""The runner's thread: built, used and closed there; nothing heavy is imported before."""

import asyncio
import gc
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve.errors import ConfigError, RunnerDeadError
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import EMPTY_RUNNER_OUTPUT
from aioserve.params import SamplingParams
from aioserve.runner.cpu import runner as cpu_runner
from aioserve.runner.cpu.runner import OneThread, ThreadedRunner
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from aioserve.support import progress
from tests import processes
from tests.models import make_model
from tests.runner.driver import NUM_BLOCKS, make_config

NO_ROWS = CachedRequestData([], [], {})
EMPTY_STEP = SchedulerOutput(0, [], NO_ROWS, {}, 0, [], [])


def make_runner(path: Path) -> ThreadedRunner:
    config = make_config(path)
    return ThreadedRunner(config, ModelInfo(config.model))


def test_steps_run_in_order_on_one_thread(model_path: Callable[..., Path]) -> None:
    async def run() -> None:
        runner = make_runner(model_path("llama"))
        assert (await runner.load()).num_kv_blocks == NUM_BLOCKS
        assert runner.num_compute_threads == 1
        request = NewRequestData(
            "a", [1, 2, 3], 3, SamplingParams(temperature=0), frozenset(), [5], 0
        )
        first = SchedulerOutput(0, [request], CachedRequestData([], [], {}), {"a": 3}, 3, [], [])
        second = SchedulerOutput(1, [], CachedRequestData(["a"], [3], {}), {"a": 1}, 1, [], [])
        outputs = await asyncio.gather(runner.execute_model(first), runner.execute_model(second))
        assert [len(output.sampled_token_ids[0]) for output in outputs] == [1, 1]
        await runner.close()
        await runner.close()
        with pytest.raises(RunnerDeadError):
            await runner.execute_model(EMPTY_STEP)

    asyncio.run(run())
    assert not [t for t in threading.enumerate() if t.name.startswith("aioserve-runner")]


def test_load_passes_on_config_errors_and_close_still_works(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path)
    (path / "model.safetensors").unlink()

    async def run() -> None:
        runner = make_runner(path)
        with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
            await runner.load()
        with pytest.raises(RunnerDeadError):
            await runner.execute_model(EMPTY_STEP)
        await runner.close()

    asyncio.run(run())


def step(step_id: int, num_tokens: int = 1) -> SchedulerOutput:
    """The first tokens of a request, or its next one."""
    params, cached = SamplingParams(temperature=0), CachedRequestData(["a"], [step_id + 1], {})
    new: list[NewRequestData] = []
    if num_tokens > 1:
        new, cached = [NewRequestData("a", [1, 2, 3], 3, params, frozenset(), [5], 0)], NO_ROWS
    return SchedulerOutput(step_id, new, cached, {"a": num_tokens}, num_tokens, [], [])


async def test_a_step_on_an_idle_thread_begins_before_the_loop_goes_on(
    model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(model_path("llama"))
    await runner.load()
    may_go_on, seen = threading.Event(), list[bool]()
    model: Any = runner._executor._model  # type: ignore[union-attr]
    forward = model.forward

    def held(*args: Any) -> Any:
        seen.append(torch.is_inference_mode_enabled())
        assert may_go_on.wait(processes.PATIENCE)
        return forward(*args)

    model.forward = held
    monkeypatch.setattr(cpu_runner, "GO_FIRST_SECONDS", processes.PATIENCE)
    let_go: list[int] = []
    open_gate = runner._open_gate

    def note() -> None:
        let_go.append(len(let_go))
        open_gate()

    monkeypatch.setattr(runner, "_open_gate", note)
    first = runner.execute_model(step(1, 3))
    assert let_go == [0]
    second = runner.execute_model(step(2))  # behind it: the loop waits for nothing
    assert let_go == [0]
    may_go_on.set()
    await asyncio.gather(first, second)
    third = runner.execute_model(step(3))
    assert let_go == [0, 1, 2]
    for result in (first, second, third):
        assert len((await result).sampled_token_ids[0]) == 1
    assert seen == [True] * 3
    assert await runner.execute_model(EMPTY_STEP) == EMPTY_RUNNER_OUTPUT  # waits for nothing
    await runner.close()


async def test_a_step_that_fails_before_it_begins_holds_the_loop_for_a_moment(
    model_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(model_path("llama"))
    await runner.load()
    with pytest.raises(KeyError):  # of a request that never came
        await runner.execute_model(step(1))
    monkeypatch.setattr(cpu_runner, "GO_FIRST_SECONDS", processes.PATIENCE)
    async with asyncio.timeout(processes.PATIENCE / 2):  # raises behind a wait for the whole of it
        assert (await runner.execute_model(step(2, 3))).req_ids == ["a"]
    await runner.close()


class Held(logging.Handler):
    """Holds the thread that loads at the line of its first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there, self.may_go_on = threading.Event(), threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.is_there.set()
        assert self.may_go_on.wait(processes.PATIENCE)


def test_a_load_that_is_cancelled_ends_before_its_next_layer(
    model_path: Callable[..., Path],
) -> None:
    held, logger = Held(), logging.getLogger(progress.__name__)

    async def run() -> None:
        runner = make_runner(model_path("llama"))
        loading = asyncio.create_task(runner.load())
        await asyncio.to_thread(held.is_there.wait, processes.PATIENCE)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        held.may_go_on.set()
        await runner.close()

    logger.addHandler(held)
    level, logger.level = logger.level, logging.INFO
    try:
        asyncio.run(run())
    finally:
        logger.removeHandler(held)
        logger.level = level
    assert not [line for line in held.lines if line.startswith("Checking fused layers")]


NAME = "aioserve-one-thread-in-a-test"


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def raise_(error: BaseException) -> None:
    raise error


def told(a: int, *, b: int) -> tuple[int, int, str]:
    return a, b, threading.current_thread().name


async def test_calls_are_done_in_order_and_their_results_reach_the_loop() -> None:
    executor, loop, done = OneThread(NAME), asyncio.get_running_loop(), list[int]()
    assert own_threads() == []  # before the first call
    calls = [executor.call(loop, lambda i=i: done.append(i)) for i in range(20)]  # type: ignore[misc]
    submitted = executor.submit(told, 1, b=2)
    await asyncio.gather(*calls)
    assert done == list(range(20))
    assert submitted.result(processes.PATIENCE) == (1, 2, NAME)
    assert await loop.run_in_executor(executor, len, "four") == 4
    executor.shutdown()
    assert own_threads() == []
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.call(loop, done.clear)


async def test_what_a_call_raises_is_raised_where_it_is_awaited() -> None:
    executor, loop = OneThread(NAME), asyncio.get_running_loop()
    with pytest.raises(ZeroDivisionError):
        await executor.call(loop, lambda: 1 // 0)
    with pytest.raises(SystemExit):
        await asyncio.wrap_future(executor.submit(raise_, SystemExit(3)))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await executor.call(loop, lambda: next(iter(())))
    assert await executor.call(loop, lambda: 7) == 7
    executor.shutdown()


async def test_a_call_that_is_cancelled_before_its_turn_is_left_out() -> None:
    executor, loop, may_go_on = OneThread(NAME), asyncio.get_running_loop(), threading.Event()
    done: list[str] = []
    held = executor.call(loop, lambda: may_go_on.wait(processes.PATIENCE))
    calls = [executor.call(loop, lambda name=name: done.append(name)) for name in "abc"]  # type: ignore[misc]
    submitted = executor.submit(done.append, "d")
    calls[1].cancel()
    submitted.cancel()
    await asyncio.sleep(0)
    held.cancel()  # it runs: its result comes to nothing
    may_go_on.set()
    await asyncio.gather(calls[0], calls[2])
    assert done == ["a", "c"]
    may_go_on.clear()
    held = executor.call(loop, lambda: may_go_on.wait(processes.PATIENCE))
    last = executor.call(loop, lambda: done.append("e"))
    executor.shutdown(wait=False, cancel_futures=True)
    may_go_on.set()
    await asyncio.gather(held, last, return_exceptions=True)
    await asyncio.to_thread(executor.shutdown)
    assert last.cancelled()
    assert done == ["a", "c"]


def test_a_loop_that_is_closed_meanwhile_ends_no_thread() -> None:
    executor, may_go_on = OneThread(NAME), threading.Event()
    loop = asyncio.new_event_loop()
    executor.call(loop, lambda: may_go_on.wait(processes.PATIENCE))
    loop.close()
    may_go_on.set()
    assert executor.submit(len, "four").result(processes.PATIENCE) == 4
    executor.shutdown()


def test_an_executor_that_is_dropped_ends_its_thread() -> None:
    executor = OneThread(NAME)
    assert executor.submit(len, "four").result(processes.PATIENCE) == 4
    [thread] = own_threads()
    del executor
    gc.collect()
    thread.join(processes.PATIENCE)
    assert not thread.is_alive()


def test_python_ends_after_the_calls_that_were_made() -> None:
    program = """
import time
from aioserve.runner.cpu.runner import OneThread
executor = OneThread("one")
executor.submit(time.sleep, 0.2)
executor.submit(print, "done")
"""
    ended = processes.run(sys.executable, "-c", program, check=True)
    assert ended.stdout == "done\n"
