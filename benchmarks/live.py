"""The whole engine under load: what the event loop adds to steps, and what it lets others wait.

So many streams at once through `AsyncEngine`, in this process, without HTTP. Knows nothing about
floors.
"""

import asyncio
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import ModelConfig, RunnerConfig
from aioserve.engine.builder import make_runner
from aioserve.lab.simulation.outcome import DelegatingRunner
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.interface import RunnerInterface
from aioserve.scheduler import SchedulerOutput

PROBE_SECONDS = 0.002  # between two looks at the event loop


class StepTimes(DelegatingRunner):
    """Passes steps on and notes those that hold nothing but a decode of each of `streams`."""

    def __init__(self, runner: RunnerInterface, streams: int) -> None:
        super().__init__(runner)
        self.compute: list[float] = []  # from hand-over to the result on the loop
        self.handover: list[float] = []  # from there to the next hand-over: update and schedule
        self._streams = streams
        self._ended = 0.0

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        began = time.perf_counter()
        is_steady = (
            scheduler_output.total_num_scheduled_tokens == self._streams
            and len(scheduler_output.num_scheduled_tokens) == self._streams
        )
        if is_steady and self._ended:
            self.handover.append(began - self._ended)

        def note(future: "asyncio.Future[ModelRunnerOutput]") -> None:
            self._ended = time.perf_counter() if is_steady else 0.0
            if is_steady:
                self.compute.append(self._ended - began)

        future = super().execute_model(scheduler_output)
        future.add_done_callback(note)
        return future


class LoopLag:
    """How long the loop leaves a callback of another thread waiting."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.seconds: list[float] = []
        self._loop, self._is_over = loop, threading.Event()
        self._thread = threading.Thread(target=self._probe)

    def __enter__(self) -> "LoopLag":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _probe(self) -> None:
        while not self._is_over.wait(PROBE_SECONDS):
            self._loop.call_soon_threadsafe(self._note, time.perf_counter())

    def _note(self, asked: float) -> None:
        self.seconds.append(time.perf_counter() - asked)


async def measure(
    path: Path, *, threads: int | None, streams: int, input_tokens: int, output_tokens: int
) -> dict[str, Any]:
    """Milliseconds unless the name says otherwise."""
    config = EngineConfig(model=ModelConfig(model=str(path)), runner=RunnerConfig(threads=threads))
    runner = StepTimes(make_runner(config, ModelInfo(config.model)), streams)
    params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)

    async def one(number: int) -> None:
        prompt = [16 + (number * 7919 + i) % 1900 for i in range(input_tokens)]
        async for _ in engine.generate(prompt, params):
            pass

    async with AsyncEngine(config, runner=runner) as engine:
        await one(-1)
        began, loop_cpu = time.perf_counter(), time.thread_time()
        with LoopLag(asyncio.get_running_loop()) as lag:
            await asyncio.gather(*(one(i) for i in range(streams)))
        seconds, loop_cpu = time.perf_counter() - began, time.thread_time() - loop_cpu
        idle_began, idle_cpu = time.perf_counter(), time.process_time()
        await asyncio.sleep(2)
        idle = (time.process_time() - idle_cpu) / (time.perf_counter() - idle_began)
    tokens = streams * output_tokens
    lags = statistics.quantiles(lag.seconds, n=100)
    return {
        "streams": streams,
        "output_tokens_per_second": tokens / seconds,
        "step_ms": 1e3 * statistics.median(runner.compute),
        "handover_us": 1e6 * statistics.median(runner.handover),
        "handover_p99_us": 1e6 * statistics.quantiles(runner.handover, n=100)[-1],
        "loop_cpu_us_per_token": 1e6 * loop_cpu / tokens,
        "loop_cpu_share": loop_cpu / seconds,
        "loop_lag_p50_ms": 1e3 * lags[49],
        "loop_lag_p99_ms": 1e3 * lags[98],
        "loop_lag_max_ms": 1e3 * max(lag.seconds),
        "idle_cpu_share": idle,
    }
