"""The worker processes of one server: started, watched, started again, ended.

Knows processes and sockets; what is said between them, `host` knows.
"""

import asyncio
import contextlib
import functools
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aioserve.engine import AsyncEngine
from aioserve.errors import ConfigError, EngineDeadError, WorkerError
from aioserve.fleet.workers.host import Host, WorkerClient
from aioserve.fleet.workers.messages import MakeReport
from aioserve.server.access.access import MainAccess
from aioserve.server.access.keys import ENVIRONMENT
from aioserve.server.app import HANDLER_TIMEOUT
from aioserve.server.loading import Loading
from aioserve.server.sockets import ListenSockets, bind_beside, share, url_of
from aioserve.support.arguments import EXIT_ENGINE_DEAD, EXIT_FAILED, EXIT_USAGE

logger = logging.getLogger(__name__)

# So often in a row a worker may end before it serves: it will not serve the next time, either.
MAX_FAILED_STARTS = 3

# Seconds before a worker is started again; twice as many each time, unless it served for a while.
FIRST_DELAY, MAX_DELAY, STEADY_SECONDS = 0.1, 5.0, 10.0

# How often in `server.worker_timeout` seconds a worker is asked whether it is there.
ASKED_TIMES = 5

# Seconds in which a worker that was told to end may do so: what handlers have, and as much again.
QUIT_SECONDS = 3 * HANDLER_TIMEOUT


NAME = "worker-{}"
FIRST_NAME = NAME.format(0)


def check_platform() -> None:
    """Raises `ConfigError` where the system does not spread connections over sockets."""
    if sys.platform != "linux":
        raise ConfigError(
            "server.api_workers needs Linux, which spreads connections over the sockets of a port: "
            "leave it at 0"
        )


@contextlib.asynccontextmanager
async def workers_listening(
    engine: AsyncEngine,
    doors: ListenSockets,
    access: MainAccess,
    stop: Callable[[], None],
    loading: Loading,
) -> AsyncIterator[str]:
    """Serve a started `engine` on the addresses of `doors` inside the block, by workers; yields
    the URL. `stop` is called when they cannot go on, `loading` stopped when they can take over.

    Raises `WorkerError` if that is so.
    """
    with tempfile.TemporaryDirectory(prefix="aioserve-") as folder:  # for this user alone
        pool = WorkerPool(engine, doors, access, Path(folder), stop, loading)
        try:
            await pool.start()
            yield url_of(doors.public[0], is_encrypted=access.tls is not None)
        finally:
            await pool.close()
    if pool.failure is not None:
        raise pool.failure


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _environment() -> dict[str, str]:
    """Ours, without the keys: workers are told their hashes."""
    return {name: value for name, value in os.environ.items() if name != ENVIRONMENT}


class WorkerPool:
    """The number of workers that the settings say, each kept alive by a task."""

    def __init__(
        self,
        engine: AsyncEngine,
        doors: ListenSockets,
        access: MainAccess,
        folder: Path,
        stop: Callable[[], None],
        loading: Loading | None = None,
    ) -> None:
        """`folder` is private: a process that can write there can speak to the engine."""
        self.failure: Exception | None = None
        self._engine = engine
        self._doors = doors
        self._folder = folder
        self._stop = stop
        self._loading = loading  # None: it has gone, and its sockets with it
        self._host = Host(engine, access)
        self._lives = 0
        self._closing = asyncio.Event()
        self._lifeline = os.pipe()  # its other end closes with this process, however that ends
        self._keepers: list[asyncio.Task[None]] = []
        self._processes: dict[asyncio.subprocess.Process, WorkerClient] = {}

    async def start(self) -> None:
        """Return when all are listening. Raises `WorkerError` if one cannot."""
        names = [NAME.format(number) for number in range(self._engine.config.server.api_workers)]
        preparing, starting = set(names), set(names)
        is_up = asyncio.Event()

        def on_prepared(worker: WorkerClient) -> None:
            """From when the first of them answers, nothing else does: they begin together."""
            had_to_wait = bool(preparing)
            preparing.discard(worker.name)
            if preparing:
                return
            if had_to_wait and self._loading is not None:
                self._loading.stop()
            for prepared in self._host.workers if had_to_wait else [worker]:
                prepared.listen()

        def on_listening(name: str) -> None:  # for the first time, or anew
            starting.discard(name)
            if not starting:
                is_up.set()

        self._host.on_prepared = on_prepared
        for name in names:
            keeper = self._keep(name, functools.partial(on_listening, name))
            self._keepers.append(asyncio.create_task(keeper))
        waiting = asyncio.create_task(is_up.wait())
        try:
            done, _ = await asyncio.wait(
                {waiting, *self._keepers}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            waiting.cancel()
        for task in done - {waiting}:
            task.result()
        if (failure := self.failure) is not None:
            raise failure
        self._loading = None

    async def close(self) -> None:
        """Have all workers end, and wait until they have. Idempotent."""
        self._closing.set()
        exit_code = EXIT_ENGINE_DEAD if self._engine.errored is not None else 0
        for process, worker in self._processes.items():
            if worker.is_prepared:
                worker.quit(exit_code)
            else:  # it has no clients, and does not listen to us yet
                _kill(process)
        try:
            if self._keepers:
                _, late = await asyncio.wait(self._keepers, timeout=QUIT_SECONDS)
                for process in self._processes:  # of those that are late
                    _kill(process)
                if late:
                    await asyncio.wait(late)
        finally:
            for task in self._keepers:
                task.cancel()
            for end in self._lifeline:
                os.close(end)
            self._host.shutdown()

    async def _keep(self, name: str, on_listening: Callable[[], None]) -> None:
        """One worker, life after life, until the server ends."""
        num_failed, delay = 0, FIRST_DELAY
        while not self._closing.is_set():
            since = time.monotonic()
            try:
                exit_code, was_listening = await self._live(name, on_listening)
                why = f"with exit code {exit_code}: its own last line says why"
            except EngineDeadError:  # it has been shut down: so will we be
                return
            except OSError as error:  # no memory, no descriptors: now, or for good
                exit_code, was_listening, why = EXIT_FAILED, False, f"at its start: {error}"
                logger.error("%s cannot be started: %s", name, error)
            if self._closing.is_set():
                return
            num_failed = 0 if was_listening else num_failed + 1
            if num_failed == MAX_FAILED_STARTS or (num_failed and exit_code == EXIT_USAGE):
                times = "" if num_failed == 1 else f" {num_failed} times"
                self._fail(WorkerError(f"{name} has ended{times} before it served, {why}"))
                return
            if time.monotonic() - since > STEADY_SECONDS:
                delay = FIRST_DELAY
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY)

    async def _live(self, name: str, on_listening: Callable[[], None]) -> tuple[int, bool]:
        """Return one life: its exit code, and whether it has served."""
        self._lives += 1
        address = f"ipc://{self._folder}/{self._lives}"
        worker = self._host.open(name, address, on_listening)
        try:
            process = await self._spawn(name, address)
            self._processes[process] = worker
            if self._closing.is_set():  # meanwhile
                _kill(process)
            watch = asyncio.create_task(self._end_hung(worker, process))
            try:
                exit_code = await process.wait()
            finally:
                watch.cancel()
            del self._processes[process]
        finally:
            num_dropped = self._host.close(worker)
        if not self._closing.is_set():
            logger.error(
                "%s (process %d) has ended with exit code %d: its %d requests are aborted",
                *(name, process.pid, exit_code, num_dropped),
            )
        return exit_code, worker.is_listening

    async def _end_hung(self, worker: WorkerClient, process: asyncio.subprocess.Process) -> None:
        """Kill a worker that serves and does not answer any more: its clients would wait for ever.

        Counts questions, not time: if this process was stopped as well, no worker hangs.
        """
        pause, num_unanswered = self._engine.config.server.worker_timeout / ASKED_TIMES, 0
        while num_unanswered < ASKED_TIMES:
            if worker.is_listening and await worker.ask(MakeReport(), pause) is None:
                num_unanswered += 1
            else:
                num_unanswered = 0
                await asyncio.sleep(pause)
        logger.error(
            "%s (process %d) has not answered for %g s (--worker-timeout): it is killed",
            *(worker.name, process.pid, self._engine.config.server.worker_timeout),
        )
        _kill(process)

    async def _spawn(self, name: str, address: str) -> asyncio.subprocess.Process:
        """On sockets of its own for the addresses that we hold: the system spreads connections
        over all that listen, and over the others when it dies. The first worker has those on which
        was answered so far: else the connections that wait there would be lost.
        """
        if self._loading is not None and name == FIRST_NAME:
            own = [share(sock) for sock in self._loading.sockets]
        else:
            own = [bind_beside(sock) for sock in self._doors.all]
        try:
            lifeline, descriptors = self._lifeline[0], [sock.fileno() for sock in own]
            server, num_admin = self._engine.config.server, len(self._doors.admin)
            words = (name, address, server.log_level, server.log_format)
            numbers = map(str, (lifeline, num_admin, *descriptors))
            command = ("-m", "aioserve.fleet.workers.worker", *words, *numbers)
            # The same package as ours, and not what may lie in the working directory.
            root = str(Path(__file__).parents[3])
            paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", *command),
                env={**_environment(), "PYTHONPATH": paths},
                pass_fds=(lifeline, *descriptors),
                start_new_session=True,  # Ctrl-C is for the engine's process
            )
        finally:
            for sock in own:
                sock.close()

    def _fail(self, error: Exception) -> None:
        self.failure = error
        if self._loading is None:  # else `start` raises it
            self._stop()
