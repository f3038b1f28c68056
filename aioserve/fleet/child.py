"""The blocking API of an engine in a process of its own, and that process as others see it.

The program starts it, tells it by a pipe what to serve, keeps its log, and ends it. Last, what runs
in the child: a server on a Unix socket, with settings from the pipe and without arguments.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar, Unpack

import msgspec

from aioserve.client import AsyncClient
from aioserve.config import EngineConfig
from aioserve.engine.language_model import ModelPrompt, RequestFields
from aioserve.errors import (
    AioserveError,
    ConfigError,
    EngineDeadError,
    EngineStartError,
    ForeignLoopError,
    RequestFailedError,
)
from aioserve.outputs import FinishedOutput, RequestOutput
from aioserve.params import SamplingParams
from aioserve.support.arguments import EXIT_ENGINE_DEAD, EXIT_FAILED, EXIT_USAGE, run
from aioserve.support.logs import set_up_logging
from aioserve.support.process import end_at_sigterm, ignore_sigterm, prepare_process
from aioserve.support.whole_texts import generate_all

_LENGTH_BYTES = 8


class Orders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The orders to a child: what to serve, and what to clear away afterwards."""

    config: EngineConfig
    own_folder: str | None = None  # made for the socket alone; empty once the server has ended


def send(pipe: IO[bytes], orders: Orders) -> None:
    """Write them, and leave the pipe open. Raises `OSError`."""
    data = msgspec.msgpack.encode(orders)
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Orders:
    """Read them, and not a byte more. Raises `EOFError` if the writer ended before the last one."""
    length = int.from_bytes(_read(pipe, _LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(_read(pipe, length), type=Orders)


def _read(pipe: IO[bytes], length: int) -> bytes:
    data = b""
    while len(data) < length:  # a pipe gives what there is
        if not (more := pipe.read(length - len(data))):
            raise EOFError("the program that wanted an engine ended before it had said which")
        data += more
    return data


# One engine's process, seen from the program that started it: its start, its log, its end. Knows
# `Popen`, pipes and exit codes. Knows no request.


logger = logging.getLogger(__name__)

MAX_SOCKET_PATH = 100  # bytes; Linux takes 107, other systems 103
MAX_LAST_WORDS = 8  # lines that are told of a process that has ended
# Seconds that it may take to end after its drain, before it is killed. Its own last resort is
# quicker.
ENDING_SECONDS = 15.0


class _LogLine(msgspec.Struct):
    """A line of the engine's log, as `log_format.JsonFormatter` writes it."""

    level: str
    logger: str
    message: str
    traceback: str = ""


_decoder = msgspec.json.Decoder(_LogLine)


class Child:
    """The process, from its start on. Any thread may call."""

    def __init__(self, config: EngineConfig) -> None:
        """Start it; `path` is where its socket will be. Raises `EngineStartError` if it cannot be
        started.
        """
        self._drain_timeout = config.server.drain_timeout
        own_folder = None
        if config.access.uds is None:
            own_folder = _private_folder()
            uds = os.path.join(own_folder, "engine.sock")
            access = msgspec.structs.replace(config.access, uds=uds)
            config = msgspec.structs.replace(config, access=access)
        self.path = str(config.access.uds)
        environment = dict(os.environ)
        environment.pop("AIOSERVE_API_KEYS", None)  # this program alone reaches the socket
        # What can be imported here can be imported there: a policy of a package of yours.
        here = [os.path.abspath(path) for path in sys.path]
        environment["PYTHONPATH"] = os.pathsep.join([*here, str(Path(__file__).parents[2])])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "aioserve.fleet.child"],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the program, which ends this one
            )
        except OSError as error:
            _remove(own_folder)
            raise EngineStartError(f"the engine's process cannot be started: {error}") from error
        pipe, log = self._process.stdin, self._process.stderr
        assert pipe is not None
        assert log is not None
        self._last_words: deque[str] = deque(maxlen=MAX_LAST_WORDS)
        self._reader = threading.Thread(
            target=_pass_on, args=(log, self._last_words), name="aioserve-child-log", daemon=True
        )
        self._reader.start()
        # For a program that ends, or forgets it, without `end`: the closed pipe ends the process.
        self._forgotten = weakref.finalize(self, _let_go, pipe, own_folder)
        with contextlib.suppress(OSError):  # it has ended already, and `ended` says why
            send(pipe, Orders(config, own_folder))

    @property
    def pid(self) -> int:
        """The process id of the engine."""
        return self._process.pid

    def ended(self, seconds: float = 0.0) -> str | None:
        """Return how it ended, in words, if it has or does within `seconds`; None while it
        lives.
        """
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(1.0)  # what it said last is on its way
        how = f"with exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):  # a number without a name
                how = f"by {signal.Signals(-code).name}"
        said = " / ".join(self._last_words)
        return f"the engine's process has ended {how}" + (f"; it said last: {said}" if said else "")

    def failure(self, how: str) -> ConfigError | EngineStartError:
        """Return the error that says why the process never served."""
        words = [line for line in self._last_words if line.startswith("aioserve: error: ")]
        if self._process.returncode == EXIT_USAGE and words:
            return ConfigError(words[-1].removeprefix("aioserve: error: "))
        return EngineStartError(how)

    def end(self) -> None:
        """Ask it to end, wait for that, and clear away what is left of it. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(self._drain_timeout + ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                logger.error("the engine's process does not end: it is killed")
                self.kill()
        self._reader.join(1.0)
        self._forgotten()

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._reader.join(1.0)
        self._forgotten()


def _private_folder() -> str:
    """Return a new one that no other user can open, with a path that leaves room for a socket's
    name.
    """
    folder = tempfile.mkdtemp(prefix="aioserve-")
    if len(os.fsencode(folder)) > MAX_SOCKET_PATH - len("/engine.sock"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="aioserve-", dir="/tmp")
    return folder


def _let_go(pipe: IO[bytes], own_folder: str | None) -> None:
    with contextlib.suppress(OSError):
        pipe.close()
    _remove(own_folder)


def _remove(folder: str | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _pass_on(log: IO[bytes], last_words: deque[str]) -> None:
    """Log what it logs, by the same loggers, so that the program's logging says what is shown. What
    is no line of a log, as an error at its end, is a warning, and kept.
    """
    with log:
        for data in log:
            text = data.decode("utf-8", "replace").rstrip()
            try:
                line = _decoder.decode(data)
                level = logging.getLevelNamesMapping()[line.level.upper()]
            except (msgspec.DecodeError, UnicodeError, RecursionError, KeyError):
                if text:
                    last_words.append(text)
                    logger.warning("%s", text)
                continue
            if level >= logging.ERROR:
                last_words.append(line.message)
            told = f"{line.message}\n{line.traceback}" if line.traceback else line.message
            logging.getLogger(line.logger).log(level, "%s", told)


# The blocking API of an engine in a process of its own. A thread with an event loop asks it, over a
# Unix socket. Knows `AsyncClient` and the process; knows no engine.


T = TypeVar("T")

READY_SECONDS = 0.02  # between two looks whether the model is loaded
# In which a process whose connection broke is seen to have ended. If it has not, the error is told
# as it came.
LAST_SECONDS = 2.0
CLOSED = "the engine's process was ended by close()"


class EngineProcess:
    """An engine in a process of its own, asked by calls that block: for programs without an event
    loop, and for those whose own work would keep an engine in their process from its steps.

        with EngineProcess(EngineConfig()) as engine:
            print(engine.generate_one("Who's there?", SamplingParams(max_tokens=32)).text)

    Any thread of the program that started it may call, and several at a time are served together.
    The process ends with `close`, and with the program, however that ends. An async program gives
    `base_url` to an `AsyncClient`. What the engine logs is logged here, by the same loggers.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        """Cheap; `start` does the work. Raises `ConfigError` for keys and certificates: only
        this program reaches the engine.
        """
        self.config = config or EngineConfig()
        access = self.config.access
        for name in ("api_keys_file", "ssl_certfile", "admin_port"):
            if getattr(access, name) is not None:
                raise ConfigError(f"access.{name} is for a server, and this program alone asks")
        self._child: Child | None = None
        self._client: AsyncClient | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=_turn, args=(self._loop,), name="aioserve-client", daemon=True
        )
        self._owner = os.getpid()
        self._guard = threading.Lock()  # held while it starts or closes
        self._submitting = threading.Lock()  # held while a call is given to the loop
        self._is_closed = False
        self._is_loop_over = False  # what is given to it would never run

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def base_url(self) -> str:
        """The address of the engine, for an `AsyncClient`. Raises `EngineDeadError` before the
        start.
        """
        return self._asked().base_url

    @property
    def pid(self) -> int:
        """The process id of the engine. Raises `EngineDeadError` before the start."""
        self._asked()
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        """Start the process and return when its model is loaded: once in its life.

        Raises `ConfigError` for settings that cannot work, and `EngineStartError` with its last
        words if it ends before it serves, for a second call, and for one after `close`.
        """
        with self._guard:
            if self._is_closed:
                raise EngineStartError("start() after close(): make another EngineProcess")
            if self._child is not None:
                raise EngineStartError("start() was called before: make another EngineProcess")
            child = self._child = Child(self.config)
            self._thread.start()
            client = AsyncClient(f"unix:{child.path}")
            try:
                self._run(self._until_ready(client, child))
            except BaseException:  # Ctrl-C, too
                child.kill()
                self._end_loop(client)
                self._is_closed = True
                raise
            self._client = client
            # Dropped without `close`: the process ends with `child`, and the thread by this.
            weakref.finalize(self, _end_turns, self._loop, client).atexit = False

    def close(self) -> None:
        """End the engine and its process: requests of other threads may finish for
        `server.drain_timeout` seconds. Idempotent.
        """
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
            if self._child is None:
                self._loop.close()
                return
            self._child.end()
            assert self._client is not None
            self._end_loop(self._client)

    def generate(
        self,
        prompt: ModelPrompt,
        sampling_params: SamplingParams | None = None,
        **fields: Unpack[RequestFields],
    ) -> Iterator[RequestOutput]:
        """Yield the deltas of one request, as `AsyncClient.generate`; of messages, as its `chat`.

        Leaving the loop aborts the request when the iterator is collected, at once in CPython.
        Raises what these raise, and `EngineDeadError` with the reason once the process has ended.
        """
        client = self._asked()
        outputs = client.generate(prompt, sampling_params, **fields)
        try:
            while (output := self._run(self._next(outputs))) is not None:
                yield output
        finally:
            # Not waited for: this may be the end of the program, whose threads have stopped.
            with contextlib.suppress(EngineDeadError):
                self._submit(_close(outputs))

    def generate_one(
        self,
        prompt: ModelPrompt,
        sampling_params: SamplingParams | None = None,
        **fields: Unpack[RequestFields],
    ) -> FinishedOutput:
        """Return the whole reply in one output, as `AsyncClient.generate_one`. Ctrl-C aborts the
        request.

        Raises what that raises, and `EngineDeadError` with the reason once the process has ended.
        """
        return self._run(self._generate_one(self._asked(), prompt, sampling_params, fields))

    def generate_all(
        self,
        prompts: Iterable[ModelPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        max_concurrency: int | None = None,
        **fields: Unpack[RequestFields],
    ) -> list[FinishedOutput]:
        """Return the whole replies to many prompts, in their order, as `AsyncClient.generate_all`:
        at most `max_concurrency` at a time, by default as many as a step can have. Ctrl-C aborts
        them.

        Raises what that raises: `PromptsFailedError` after all have ended if some got an error.
        """
        client, most = self._asked(), max_concurrency
        if most is None:
            most = self.config.scheduler.max_num_seqs

        def ask(
            prompt: ModelPrompt, params: SamplingParams | None, own: Any
        ) -> Coroutine[Any, Any, FinishedOutput]:
            return self._generate_one(client, prompt, params, own)

        return self._run(generate_all(ask, prompts, sampling_params, most, fields))

    def _asked(self) -> AsyncClient:
        """Raises `EngineDeadError` or `ForeignLoopError` if it cannot be asked."""
        if self._is_closed:
            raise EngineDeadError(CLOSED)
        if self._client is None or self._child is None:
            raise EngineDeadError("the engine's process has not been started")
        if os.getpid() != self._owner:
            raise ForeignLoopError(
                "an EngineProcess belongs to the process that started it, and this is a fork of "
                "that: start one here"
            )
        return self._client

    async def _until_ready(self, client: AsyncClient, child: Child) -> None:
        while not await client.health():
            if (how := child.ended()) is not None:
                raise child.failure(how)
            await asyncio.sleep(READY_SECONDS)

    async def _generate_one(
        self,
        client: AsyncClient,
        prompt: ModelPrompt,
        params: SamplingParams | None,
        fields: RequestFields,
    ) -> FinishedOutput:
        try:
            return await client.generate_one(prompt, params, **fields)
        except (EngineDeadError, RequestFailedError) as error:
            await self._check_alive(error)
            raise

    async def _next(self, outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
        try:
            return await anext(outputs, None)
        except (EngineDeadError, RequestFailedError) as error:
            await self._check_alive(error)
            raise

    async def _check_alive(self, error: Exception) -> None:
        """Raises how the process has ended, if that is behind `error`."""
        assert self._child is not None
        if isinstance(error, RequestFailedError) and "ended the stream" not in str(error):
            return
        if self._is_closed:
            raise EngineDeadError(CLOSED) from error
        if (how := await asyncio.to_thread(self._child.ended, LAST_SECONDS)) is not None:
            raise EngineDeadError(how) from error

    def _run(self, call: Coroutine[Any, Any, T]) -> T:
        """On the thread's loop, to its end; an interrupted wait cancels it."""
        future = self._submit(call)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _submit(self, call: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        with self._submitting:
            if not self._is_loop_over:
                return asyncio.run_coroutine_threadsafe(call, self._loop)
        call.close()  # else Python warns that it was never awaited
        raise EngineDeadError(CLOSED)

    def _end_loop(self, client: AsyncClient) -> None:
        """Once the process has ended; calls of other threads that wait are told so."""
        with self._submitting:
            self._is_loop_over = True
        asyncio.run_coroutine_threadsafe(_settle(client), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _settle(client: AsyncClient) -> None:
    """Every other call on this loop has its answer or its error, and nothing stays open."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        _, late = await asyncio.wait(others, timeout=2 * LAST_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    await client.close()
    await loop.shutdown_default_executor()


async def _close(outputs: AsyncGenerator[RequestOutput, None]) -> None:
    await outputs.aclose()


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop on its thread until it is stopped."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end_turns(loop: asyncio.AbstractEventLoop, client: AsyncClient) -> None:
    """Have a loop and its thread end, once the client is closed. Waits for nothing."""

    async def end() -> None:
        await _settle(client)
        loop.stop()

    if not loop.is_closed():
        asyncio.run_coroutine_threadsafe(end(), loop)


# The child: a server on a Unix socket. It ends when the program wants it to, and with the program,
# however that ends: stdin is a pipe whose other end closes then.


def main() -> int:
    """Serve until the program ends or SIGTERM comes. Returns the exit code, that of `serve`."""
    prepare_process()
    end_at_sigterm()
    try:
        # Unbuffered: what comes after the orders is for the thread that waits for the end.
        orders = receive(os.fdopen(os.dup(0), "rb", buffering=0))
    except EOFError:
        return EXIT_FAILED
    threading.Thread(target=_end_with_program, name="aioserve-lifeline", daemon=True).start()
    config = orders.config
    set_up_logging(config.server.log_level, "json")  # the program logs them as its own
    # That it was interrupted is no news to the program, which has ended it.
    logging.getLogger("aioserve.server.process").setLevel(logging.ERROR)
    try:
        from aioserve.server.app import serve

        try:
            run(serve(config))
        finally:
            ignore_sigterm()
    except AioserveError as error:
        print(f"aioserve: error: {error}", file=sys.stderr)  # noqa: T201
        if isinstance(error, ConfigError):
            return EXIT_USAGE
        return EXIT_ENGINE_DEAD if isinstance(error, EngineDeadError) else EXIT_FAILED
    finally:
        if orders.own_folder is not None:
            with contextlib.suppress(OSError):
                os.rmdir(orders.own_folder)
    return 0


def _end_with_program() -> None:
    while os.read(0, 4096):  # it writes no more: this returns when the other end is closed
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # again and again would not let it drain


if __name__ == "__main__":
    sys.exit(main())
