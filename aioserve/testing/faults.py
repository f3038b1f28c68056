"""Faults as data, and small things around the real parts of a server that make them happen.

A `Fault` says what goes wrong where, and at the how many-th time; `Faults` holds those that are
still to come. `FaultyRunner`, `faulty` and `FaultyLines` ask it at each pass: around a runner,
around any method of any part, and at any line of a request's way (`points` lists them, made from
the code). Nothing here is for a server that serves.
"""

import ast
import asyncio
import errno
import functools
import inspect
import json
import os
import resource
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import msgspec

import aioserve
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.interface import NOT_FINITE, RunnerInterface
from aioserve.scheduler.output import SchedulerOutput

# What goes wrong, as data, and small things around real parts that make it happen.


def planted(kind: str, where: str) -> BaseException:
    """Return what is raised; its words say that it was planted, and where, so that a log can be
    searched for them.
    """
    what = f"planted in {where}"
    errors: dict[str, BaseException] = {
        "raises": RuntimeError(what),
        "no memory": MemoryError(what),
        "cancelled": asyncio.CancelledError(what),
    }
    numbers = {"disk full": errno.ENOSPC, "no descriptors": errno.EMFILE, "reset": errno.ECONNRESET}
    if kind in numbers:
        return OSError(numbers[kind], f"{os.strerror(numbers[kind])}, {what}")
    return errors[kind]


#: What any call may do instead of what it should: raise one of these kinds, or take its time.
KINDS = ("raises", "no memory", "cancelled", "disk full", "no descriptors", "reset", "slow")
SLOW_SECONDS = 0.02


class Fault(msgspec.Struct, frozen=True):
    """`kind` happens in `part`, after that was passed `after` times more."""

    part: str
    kind: str
    after: int = 0

    def __str__(self) -> str:
        return f"{self.part}: {self.kind}"


class Faults:
    """The faults that are to come, each once, and how often each came."""

    def __init__(self) -> None:
        self._armed: list[list[int | Fault]] = []  # passes that are left, and the fault
        #: By part and kind.
        self.injected: Counter[str] = Counter()
        #: Those that came, in order.
        self.came: list[Fault] = []
        #: Ids of requests that a fault has touched, of the faults that know their requests.
        self.touched: set[str] = set()

    def arm(self, fault: Fault) -> None:
        """Let the fault come once."""
        self._armed.append([fault.after, fault])

    def disarm(self) -> None:
        """Take back the fault that was to come."""
        self._armed.clear()

    def comes(self, part: str) -> str | None:
        """A part is passed: the kind of fault that comes now, if one does."""
        found: str | None = None
        for entry in list(self._armed):
            left, fault = entry
            assert isinstance(fault, Fault)
            assert isinstance(left, int)
            if fault.part != part:
                continue
            if left or found is not None:
                entry[0] = max(left - 1, 0)
                continue
            found = fault.kind
            self._armed.remove(entry)
            self.injected[str(fault)] += 1
            self.came.append(fault)
        return found

    def _pairs(self) -> list[tuple[int, Fault]]:
        return [(left, fault) for left, fault in self._armed]  # type: ignore[misc]


# An event loop whose clock jumps ahead: as of a machine that was stopped, or that swaps. Knows
# timers; knows nothing about what they are for.


class JumpingLoop(asyncio.SelectorEventLoop):
    """Real time, and what `jump` adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead = 0.0

    def time(self) -> float:
        """Return the time in seconds, as any loop does."""
        return super().time() + self._ahead

    def jump(self, seconds: float) -> None:
        """Let `seconds` pass at once: all that was to happen in them is due."""
        self._ahead += seconds


# Faults around a method of any part, and in what the process is given by the system. Knows methods;
# knows nothing about what they do.


def faulty(
    faults: Faults,
    part: str,
    owner: Any,
    name: str,
    nonsense: Callable[[Any], Any] = lambda result: None,
) -> None:
    """From now on `owner.name(...)` meets the faults of `part`. Of the kind "nonsense", it returns
    what `nonsense` makes of its result. `owner` is an object, or a class whose objects it means.
    """
    method = getattr(owner, name)
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            kind = faults.comes(part)
            if kind == "slow":
                await asyncio.sleep(SLOW_SECONDS)
            elif kind not in (None, "nonsense"):
                raise planted(str(kind), part)
            result = await method(*args, **kwargs)
            return nonsense(result) if kind == "nonsense" else result

        setattr(owner, name, asynchronous)
        return

    @functools.wraps(method)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        kind = faults.comes(part)
        if kind == "slow":
            time.sleep(SLOW_SECONDS)
        elif kind not in (None, "nonsense"):
            raise planted(str(kind), part)
        result = method(*args, **kwargs)
        return nonsense(result) if kind == "nonsense" else result

    setattr(owner, name, synchronous)


def open_descriptors() -> dict[int, str]:
    """Return what this process has open, by number."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except OSError:
            continue  # that of the listing itself
    return found


@contextmanager
def few_descriptors(spare: int = 0) -> Iterator[None]:
    """Inside the block this process may open `spare` more descriptors than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_descriptors()) + 1 + spare, hard))
    # Numbers below that are free as well: they are taken.
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for number in held[:spare]:
            os.close(number)
        held = held[spare:]
    try:
        yield
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# A runner that fails as runners may: it raises, hangs, is slow, or says what cannot be. Knows the
# interface; the steps that go well are the real runner's.


#: What a step may do.
RUNNER_KINDS = (
    "raises",  # when it is done
    "raises unread",  # before the real runner hears of it
    "raises at once",  # and not where its result is awaited
    "no memory",
    "cancelled",
    "slow",
    "short",  # a row of tokens is missing
    "many",  # a row has tokens that were not asked for
    "foreign",  # tokens that the model does not have
    "stranger",  # tokens for a request that is not there
    "nan",
)
HANGS = "hangs"  # the step does not come back: for engines whose watchdog ends it


class FaultyRunner:
    """A runner with faults around the steps of a real one, of any kind."""

    def __init__(self, runner: RunnerInterface, faults: Faults, part: str = "runner") -> None:
        """From now on `runner` meets the faults of `part`."""
        self._execute = runner.execute_model
        self._faults, self._part = faults, part
        runner.__dict__["execute_model"] = self

    def __call__(self, step: SchedulerOutput) -> "asyncio.Future[ModelRunnerOutput]":
        # A step that only tells of departures has no result that could be wrong.
        kind = self._faults.comes(self._part) if step.num_scheduled_tokens else None
        if kind is None:
            return self._execute(step)
        self._faults.touched.update(step.num_scheduled_tokens)
        loop = asyncio.get_running_loop()
        if kind == "raises at once":
            raise RuntimeError(f"planted in {self._part}")
        if kind in ("raises unread", HANGS):
            future: asyncio.Future[ModelRunnerOutput] = loop.create_future()
            if kind != HANGS:
                future.set_exception(RuntimeError(f"planted in {self._part}"))
            return future
        return loop.create_task(self._wrong(kind, self._execute(step)))

    async def _wrong(
        self, kind: str, step: "asyncio.Future[ModelRunnerOutput]"
    ) -> ModelRunnerOutput:
        result = await step
        if kind == "slow":
            await asyncio.sleep(SLOW_SECONDS)
            return result
        if kind in ("raises", "no memory", "cancelled"):
            raise planted(kind, self._part)
        return spoilt(kind, result)


def spoilt(kind: str, result: ModelRunnerOutput) -> ModelRunnerOutput:
    """Return a result that is wrong in one way of `RUNNER_KINDS`, in its first row."""
    tokens = [list(own) for own in result.sampled_token_ids]
    changed: dict[str, Any] = {"sampled_token_ids": tokens}
    if kind == "short":
        tokens.pop(0)
    elif kind == "many":
        tokens[0] += [1, 2, 3]
    elif kind == "foreign":
        tokens[0] = [10**9, -1][: max(len(tokens[0]), 1)]
    elif kind == "stranger":
        changed["req_ids"] = ["nobody", *result.req_ids[1:]]
    elif kind == "nan":
        tokens[0] = []
        name = result.req_ids[0]
        changed["failed"] = {name: NOT_FINITE}
        changed["logprobs"] = {key: told for key, told in result.logprobs.items() if key != name}
    return msgspec.structs.replace(result, **changed)


# Every point of a request's way at which something may be raised: a list made from the code.


ROOT = Path(aioserve.__file__).parent

#: The files of a request's way, in its order.
WAY = (
    *("server/middleware.py", "server/access/gate.py", "server/body.py"),
    *("server/completions.py", "server/chat/routes.py", "server/generation.py"),
    *("server/running.py",),
    *("engine/client.py", "engine/input_processor.py", "engine/admission.py"),
    *("engine/async_engine.py", "engine/stream.py", "engine/output_processor.py"),
    *("engine/core.py", "engine/step_loop.py", "engine/metrics.py", "engine/request_log.py"),
)


class Point(msgspec.Struct, frozen=True):
    """A line of a file below `aioserve`, and in which function it stands."""

    path: str
    line: int
    function: str
    what: str  # "awaits", "calls back" or "is called back"

    @property
    def part(self) -> str:
        """The name of the point, as faults use it."""
        return f"{self.path}:{self.line} {self.function} {self.what}"


@cache
def points(paths: tuple[str, ...] = WAY) -> tuple[Point, ...]:
    """Return all points of the given files, in order."""
    found: dict[tuple[str, int], Point] = {}
    for path in paths:
        file = ROOT / path
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for point in _Points(path, tree).all():
            found.setdefault((point.path, point.line), point)
    return tuple(found.values())


class _Points:
    """The points of one file, in order."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self._path, self._tree = path, tree
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        self._functions = {function.name: function for function in functions}
        self._given = {name for function in functions for name in _kept(function)}

    def all(self) -> Iterator[Point]:
        for function in ast.walk(self._tree):
            if isinstance(function, ast.AsyncFunctionDef | ast.FunctionDef):
                yield from self._of(function)

    def _of(self, function: ast.AsyncFunctionDef | ast.FunctionDef) -> Iterator[Point]:
        given = {argument.arg for argument in function.args.args}
        for node in _own_nodes(function):
            if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
                yield self._point(node, function, "awaits")
            if not isinstance(node, ast.Call):
                continue
            called, own = node.func, _name_of_own(node.func)
            # A function that it was given, or that its object was made with.
            if (isinstance(called, ast.Name) and called.id in given) or own in self._given:
                yield self._point(node, function, "calls back")
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if (callback := self._callback(argument)) is not None:
                    yield self._point(_first(callback), callback, "is called back")

    def _callback(self, argument: ast.expr) -> ast.FunctionDef | None:
        """Return the method or function of this file that is handed over as such."""
        if name := _name_of_own(argument):
            return self._functions.get(name)
        return self._functions.get(argument.id) if isinstance(argument, ast.Name) else None

    def _point(self, node: Any, function: Any, what: str) -> Point:
        return Point(self._path, node.lineno, function.name, what)


def _name_of_own(node: ast.expr) -> str:
    """Return the name `x` of `self.x`; empty for all other expressions."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if is_own and node.value.id == "self" else ""  # type: ignore[attr-defined]


def _kept(function: ast.FunctionDef) -> Iterator[str]:
    """Yield what an object keeps, as it is, of what it was made with: `x` of `self.x = y`."""
    if function.name != "__init__":
        return
    given = {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            if node.value.id in given and len(node.targets) == 1:
                yield _name_of_own(node.targets[0])


def _first(function: ast.FunctionDef) -> ast.stmt:
    """Return the first statement behind the docstring."""
    body = function.body
    return body[1] if ast.get_docstring(function) is not None and len(body) > 1 else body[0]


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield all below it, but for what functions in it are made of."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.AsyncFunctionDef | ast.FunctionDef | ast.Lambda):
            yield from _own_nodes(child)


class FaultyLines:
    """A block that raises the faults of points, in the thread that enters it, for as long as it is
    entered.

    A debugger or a coverage of that thread is set aside meanwhile.
    """

    def __init__(self, faults: Faults, among: Iterable[Point]) -> None:
        self._faults = faults
        self._points = {(str(ROOT / point.path), point.line): point for point in among}
        self._files = {file for file, _ in self._points}
        self._before: Any = None
        #: Points that were passed, with and without a fault.
        self.passed: set[Point] = set()

    def __enter__(self) -> "FaultyLines":
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.settrace(self._before)

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = False
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        point = self._points.get((frame.f_code.co_filename, frame.f_lineno))
        if event == "line" and point is not None:
            self.passed.add(point)
            kind = self._faults.comes(point.part)
            if kind is not None:
                # What a trace function raises ends all tracing: it goes on with the next callback.
                asyncio.get_running_loop().call_soon(sys.settrace, self._on_call)
                raise planted(kind, point.part)
        return self._on_line


# Clients on raw sockets: one that reads to the end, and those that reset, half-close, stall or
# flood.


#: How a client behaves.
CLIENTS = ("streams", "whole", "resets", "half-closes", "stalls", "floods", "leaves")
#: Those whose answers are read to their ends.
READERS = ("streams", "whole")
NUM_FLOOD = 24  # requests of one that floods
STALL_BYTES = 4096  # of the socket of one that stalls


class Told(msgspec.Struct):
    """The answers to a client up to its end."""

    status: int = 0  # 0: the connection ended without an answer
    texts: dict[int, str] = {}  # by choice
    finish_reasons: dict[int, str] = {}  # by choice, of those that have ended
    error: str = ""
    is_whole: bool = False  # the answer ended as answers do

    @property
    def is_served(self) -> bool:
        """Whether the client got all that it asked for."""
        ends = self.finish_reasons
        is_good = bool(ends) and ends.keys() == self.texts.keys()
        is_good = is_good and set(ends.values()) <= {"length", "stop"}
        return self.is_whole and is_good and not self.error


class Client:
    """One request on a connection of its own."""

    def __init__(self, host: str, port: int, kind: str, body: dict[str, Any]) -> None:
        """`body` is that of a completion, or of a chat completion if it has messages; the kind
        decides whether it is streamed.
        """
        self.kind, self.body = kind, {**body, "stream": kind != "whole"}
        self._host, self._port = host, port
        self.told = Told()

    async def run(self) -> Told:
        """Send the request, and return what it was told until its end."""
        data = json.dumps(self.body).encode()
        path = "/v1/chat/completions" if "messages" in self.body else "/v1/completions"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        ).encode()
        sock = socket.socket()
        if self.kind == "stalls":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STALL_BYTES)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (self._host, self._port))
            reader, writer = await asyncio.open_connection(sock=sock)
        except OSError:
            sock.close()
            return self.told
        try:
            writer.write((head + data) * (NUM_FLOOD if self.kind == "floods" else 1))
            await self._behave(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the server has ended it: that is an end
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        return self.told

    async def _behave(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.kind == "half-closes":
            writer.write_eof()
        if self.kind in ("resets", "floods", "leaves"):
            with suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
            if self.kind != "leaves":  # a reset, as a process that is killed leaves one
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        if self.kind == "stalls":
            with suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n")
            return
        await self._read(reader)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.told.status = int(head.split()[1])
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        if "content-length" in fields:
            self._take(await reader.readexactly(int(fields["content-length"])))
            self.told.is_whole = True
            return
        buffer = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            buffer += (await reader.readexactly(size + 2))[:-2]
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                self._take(event.removeprefix(b"data: "))
        self.told.is_whole = True

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            found = json.loads(data)
        except ValueError:  # a text, as aiohttp answers where a server of its own fails
            self.told.error = data.decode()
            return
        if error := found.get("error"):
            self.told.error = error["message"]
            return
        for choice in found["choices"]:
            said = choice.get("delta") or choice.get("message") or {}
            text = choice["text"] if "text" in choice else said.get("content") or ""
            index = choice["index"]
            self.told.texts[index] = self.told.texts.get(index, "") + text
            if reason := choice["finish_reason"]:
                self.told.finish_reasons[index] = reason
