"""Where a run of the matrix computes: in one process, on two ranks, behind a worker, on a stand-in.

The second rank is a thread here, and so is the worker a half on the same loop, with real sockets:
what processes add is tested beside the code. The stand-in of a card computes on the CPU.
"""

import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import mkdtemp
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig
from aioserve.engine import EngineClient
from aioserve.errors import RunnerDeadError
from aioserve.gpu.tensor_parallel import cpu_following_rank
from aioserve.gpu.tensor_parallel.cpu_runner import ShardedRunner
from aioserve.gpu.tensor_parallel.plan import check_model
from aioserve.gpu.tensor_parallel.processes import (
    Answer,
    Message,
    Start,
    decode,
    encode,
    memory_file,
)
from aioserve.model_source.directory import Directory
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu.runner import ThreadedRunner
from aioserve.runner.interface import RunnerInfo, RunnerInterface
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.on_device import make_device_runner
from tests.workers.joined import connected

# `from_pretrained` changes functions of torch while it reads.
_reading = threading.RLock()


def one_at_a_time(load: Callable[..., Any]) -> Callable[..., Any]:
    """The same `load`, for ranks that are threads."""

    def load_alone(*arguments: Any, **options: Any) -> Any:
        with _reading:
            return load(*arguments, **options)

    return load_alone


@contextmanager
def loading_one_at_a_time() -> Iterator[None]:
    """Inside the block ranks that are threads read their models one after the other."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_module", "load_seeing_module"):
            patch.setattr(Directory, name, one_at_a_time(getattr(Directory, name)))
        yield


class RankThread:
    """What `OtherRanks` is to the first rank, with a second one that is a thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.meeting = Path(mkdtemp(prefix="aioserve-ranks-")) / "store"
        self._told: SimpleQueue[bytes] = SimpleQueue()
        self._is_here, self._has_loaded = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self.kv_file = memory_file() if config.cache.kv_connector != "none" else -1
        self._start = Start(config, 1, str(self.meeting), self.kv_file)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_here(self) -> None:
        self._wait(self._is_here)

    def wait_loaded(self) -> None:
        self._wait(self._has_loaded)

    def _wait(self, event: threading.Event) -> None:
        event.wait()
        if self._error is not None:
            raise RunnerDeadError(f"rank 1 of 2: {self._error}")

    def tell(self, message: Message) -> None:
        self._told.put(encode(message))

    def why(self, error: Exception) -> Exception:
        self._thread.join(0.5)
        return error if self._error is None else RunnerDeadError(f"rank 1 of 2: {self._error}")

    def close(self) -> None:
        self._told.put(b"")
        self._thread.join()
        if self.kv_file >= 0:
            os.close(self.kv_file)

    # The other end, as `FirstRank` has it.

    def hear(self, decode: Callable[[bytes], Message]) -> Message:
        if not (data := self._told.get()):
            raise EOFError
        return decode(data)

    def answer(self, answer: Answer) -> None:
        (self._has_loaded if answer.has_loaded else self._is_here).set()

    def _run(self) -> None:
        try:
            info = ModelInfo(self._start.config.model)
            check_model(self._start.config, info)
            obey = cpu_following_rank.load_share(self, self._start, info)  # type: ignore[arg-type]
            self._has_loaded.set()
            while True:
                obey(self.hear(decode))
        except EOFError:
            pass
        except Exception as error:
            self._error = error
        finally:
            self._is_here.set()
            self._has_loaded.set()


class RunnerOfThreads(ShardedRunner):
    """The runner of two ranks, one of them a thread."""

    async def load(self) -> RunnerInfo:
        self._other_ranks = RankThread(self._config)  # type: ignore[assignment]
        return await ThreadedRunner.load(self)


@asynccontextmanager
async def serving(
    config: EngineConfig, place: str, seed: int
) -> AsyncIterator[tuple[AsyncEngine, EngineClient]]:
    """An engine that has started, and what requests are asked of. Raises `ConfigError`."""
    config.check_effects()
    runner: RunnerInterface | None = None
    if place == "2 ranks":
        runner = RunnerOfThreads(config, ModelInfo(config.model))
    elif place == "CUDA stand-ins":
        runner = make_device_runner(config, FakeDevice(seed, eagerness=0.5))
    async with AsyncEngine(config, runner=runner) as engine:
        if place != "workers":
            yield engine, engine
            return
        async with connected(engine, 1) as (_, remotes, _):
            yield engine, remotes[0]
