"""Runs a policy file of a stranger, or of a program, in a process of its own that can be ended.

`look` reads the file without running it and refuses what a policy has no use for: modules beside
`aioserve.scheduler` and a few of the standard library, names that lead into the interpreter. What
passes runs in a fork of a process that knows no trial: with an empty folder, an empty environment,
limits of the kernel on memory, time, files and processes, no network where the kernel gives user
namespaces, and a hook that ends it at the first file, socket or process that it asks for. What is
measured, with workloads and seeds, is in the process that asked for the fork: a line is between
them. docs/evolve.md says what that does not stop.
"""

import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import msgspec

from aioserve.errors import AioserveError
from aioserve.support.files import configs_folder

MODULE = "aioserve_candidate.policy"  # the name under which a candidate is imported
MAX_SOURCE_BYTES = 200_000
BOOT_SECONDS = 120.0  # for a process that imports the lab: under load that takes its time


class Task(msgspec.Struct, frozen=True):
    """A trial of a candidate: a function of the module `trials` by name, and its arguments, of
    which the candidate's process knows nothing.
    """

    source: str
    name: str  # of the file, for messages
    trial: str
    arguments: dict[str, Any] = {}
    seconds: float = 60.0  # of real time, after which it is ended
    megabytes: int = 2048  # of memory that the process may have


class Verdict(msgspec.Struct, frozen=True):
    """The outcome of a task: a value, or the kind of failure and its story."""

    value: Any = None
    #: "" if there is a value; "unparsable", "refused", "broken" (a rule of the contract), "failed"
    #: (it raised), "foresight", "forged" (its process said what cannot be), "caught" (it reached
    #: for something), "time", "memory" or "died".
    failure: str = ""
    story: str = ""


class Failed(Exception):
    """A candidate has failed: what `failure` of a verdict says, and the story."""

    def __init__(self, failure: str, story: str) -> None:
        super().__init__(story)
        self.failure = failure


class Gone(Exception):
    """The process of a candidate has ended without a word."""


class Lost(BaseException):
    """No candidate can be forked any more, which ends the process that measures them."""


# What can be seen without running it.


#: Modules that a policy may import. None of them reads files, clocks or other objects.
MODULES = frozenset(
    {
        *("__future__", "aioserve.scheduler", "abc", "array", "bisect", "collections"),
        *("collections.abc", "copy", "dataclasses", "enum", "fractions", "functools", "heapq"),
        *("itertools", "math", "msgspec", "operator", "random", "statistics", "typing"),
    }
)
#: Functions that lead out of a policy's own names, or to attributes that cannot be read here.
FORBIDDEN_NAMES = frozenset(
    {
        *("__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "locals"),
        *("open", "vars", "methodcaller", "SystemRandom", "get_type_hints"),
        *("f_back", "f_builtins", "f_globals", "f_locals", "gi_frame", "cr_frame", "ag_frame"),
        *("tb_frame", "tb_next", "cr_await", "gi_yieldfrom", "mro"),
    }
)
#: Functions that ask for attributes by name: called with names that can be read here, nothing else.
ASKING = frozenset({"getattr", "setattr", "delattr", "hasattr", "attrgetter"})
#: Methods and names with two underscores that policies do write.
USUAL_DUNDERS = frozenset(
    {
        *("__init__", "__post_init__", "__name__", "__doc__", "__slots__", "__all__", "__len__"),
        *("__iter__", "__contains__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__hash__"),
        *(
            "__bool__",
            "__call__",
            "__getitem__",
            "__setitem__",
            "__repr__",
            "__str__",
            "__version__",
        ),
        *("__enter__", "__exit__", "__next__", "__add__", "__sub__", "__neg__"),
    }
)


def look(source: str, name: str) -> None:
    """Raise `Failed` for a file that Python cannot parse ("unparsable"), or that has something for
    which a policy has no use ("refused"): the story says what and in which line.
    """
    if len(source.encode()) > MAX_SOURCE_BYTES:
        raise Failed("refused", f"{name} has more than {MAX_SOURCE_BYTES:,} bytes")
    try:
        tree = ast.parse(source, name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f"{name}:{line}" if line else name
        raise Failed("unparsable", f"{where}: {getattr(error, 'msg', error)}") from error
    found = sorted(_strange(tree), key=lambda each: each[0])
    if found:
        raise Failed("refused", "\n".join(f"{name}:{line}: {what}" for line, what in found[:5]))


def _strange(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield what a policy has no use for, with its line."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    plain = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call) and _names_plainly(n)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name not in MODULES:
                    yield node.lineno, _not_imported(alias.name)
        elif isinstance(node, ast.ImportFrom):
            if node.level or node.module not in MODULES:
                yield node.lineno, _not_imported("." * node.level + (node.module or ""))
            for alias in node.names:
                if is_strange(alias.name) or (alias.asname and alias.name in ASKING):
                    yield node.lineno, f"imports {alias.name}, which a policy may not use"
        elif isinstance(node, ast.Name) and is_strange(node.id):
            yield node.lineno, f"uses {node.id}, which a policy may not use"
        elif isinstance(node, ast.Attribute) and (is_strange(node.attr) or node.attr in ASKING):
            yield node.lineno, f"reads .{node.attr}, which leads out of the policy"
        elif isinstance(node, ast.Constant) and id(node) not in texts:
            if isinstance(node.value, str) and "__" in node.value:
                yield node.lineno, "has a text with two underscores, which may name an attribute"
        elif isinstance(node, ast.Name) and node.id in ASKING and id(node) not in plain:
            yield node.lineno, f"uses {node.id} for an attribute whose name is not written there"


def is_strange(name: str) -> bool:
    """Return whether a name leads out of a policy's own code."""
    is_dunder = name.startswith("__") and name.endswith("__")
    return name in FORBIDDEN_NAMES or (is_dunder and name not in USUAL_DUNDERS)


def _names_plainly(node: ast.Call) -> bool:
    """Return whether a call of one of `ASKING` has its names as plain texts."""
    if not isinstance(node.func, ast.Name):
        return False
    names = node.args if node.func.id == "attrgetter" else node.args[1:2]
    return bool(names) and all(isinstance(name, ast.Constant) for name in names)


def _not_imported(module: str) -> str:
    return (
        f"imports {module}; a policy may import aioserve.scheduler and, of the standard library, "
        "what reads neither files nor clocks (docs/evolve.md)"
    )


# The process that measures. It is asked over its input, a line of JSON each.


_START = """
import ctypes, json, sys
NEW_USER, NEW_NET = 0x10000000, 0x40000000
has_network = ctypes.CDLL(None).unshare(NEW_USER | NEW_NET) != 0
sys.path[:0] = json.loads(sys.argv[1])
from aioserve.lab.evaluate import jobs, trials
from aioserve.lab.evaluate.enclosure import serve
serve(has_network, trials, jobs)
"""


class Enclosure:
    """A process that does one task after another, with a candidate in a process of its own. Use it
    in a `with`.

    Raises `AioserveError` if the process itself cannot be had; what a candidate does is a verdict.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="aioserve-candidate-")
        root = Path(__file__).parents[3]
        paths = [str(root), *(path for path in sys.path if path and Path(path).is_absolute())]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - it is closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _START, json.dumps(list(dict.fromkeys(paths)))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=self._folder,
            env={"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        #: Whether candidates could reach a network if they got past the hook.
        self.has_network = True
        try:
            self.has_network = bool(self._answer(BOOT_SECONDS).value)
        except Failed as error:
            self.close()
            raise AioserveError(str(error)) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Enclosure":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and all that it has forked."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            if pipe is not None:
                with suppress(OSError):  # what is left to be written has no reader any more
                    pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended: it does no more tasks."""
        return self._process.poll() is not None

    def run(self, task: Task) -> Verdict:
        """Do a task; returns when it is done, has failed, or was ended. A task that ends the
        process, or makes it say nothing for longer than the task's own limit, has that as its
        verdict, and the process `is_over`.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            self._process.stdin.flush()
            return self._answer(task.seconds + BOOT_SECONDS)
        except OSError:
            verdict = Verdict(failure="died", story=self._last_words())
        except Failed as error:
            verdict = Verdict(failure=error.failure, story=str(error))
        self.close()
        return verdict

    def _answer(self, seconds: float) -> Verdict:
        """Return the next line that the process says. Raises `Failed` if there is none."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise Failed("time", f"the process of the candidates said nothing for {seconds:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise Failed("died", self._last_words())
        return msgspec.json.decode(line, type=Verdict)

    def _last_words(self) -> str:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        return f"the process of the candidates has ended: {said[-2000:]}"


def serve(has_network: bool, trials: Any, jobs: Any) -> None:
    """Do the tasks that come on stdin, until it is closed: the life of the process. `trials` is the
    module whose functions tasks name, and `jobs` the one whose functions candidates do.
    """
    trials.warm_up()
    gc.collect()
    gc.freeze()  # forks share what is there: to count references in it would copy it
    nursery = Nursery(jobs)  # before the first task: no candidate inherits one
    _hide()
    line = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    line.write(msgspec.json.encode(Verdict(value=has_network)) + b"\n")
    for asked in sys.stdin.buffer:
        task = msgspec.json.decode(asked, type=Task)
        line.write(msgspec.json.encode(_measured(task, trials, nursery)) + b"\n")


def _hide() -> None:
    """Let no process of the same user read the memory of this one (prctl PR_SET_DUMPABLE)."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)


def _measured(task: Task, trials: Any, nursery: "Nursery") -> Verdict:
    """Do a task in this process, which asks the candidate's."""
    guest = Guest(nursery, task)
    trial: Callable[..., Any] = getattr(trials, task.trial)
    try:
        return Verdict(value=trial(guest, **trials.prepare(task.arguments)))
    except Failed as error:
        return Verdict(failure=error.failure, story=str(error))
    except Exception as error:  # what a candidate may bring about where it is measured
        return Verdict(failure="failed", story=f"{type(error).__name__}: {error}"[:4000])


# The line between the two, and the process that candidates are forked from.


MAX_FRAME = 1 << 24  # bytes of what crosses at once
_VALUE, _FAILURE = b"\0", b"\1"
_BEGIN, _KILL, _WAIT = b"b", b"k", b"w"  # what the nursery is told, before four bytes of a number


class Channel:
    """One end of a line between two processes: frames of bytes, and failures."""

    def __init__(self, end: socket.socket, deadline: float | None = None, of: str = "") -> None:
        """`deadline`, on the clock `time.monotonic`, is when the other end is too `late` with what
        it does, which `of` names; None: it may take its time.
        """
        self._end = end
        self._deadline = deadline
        self._of = of
        self._rest = b""

    def send(self, data: bytes, kind: bytes = _VALUE) -> None:
        """Send a frame. Raises `Failed` if nobody reads it in time, `Gone` if nobody is there."""
        try:
            self._set_timeout()
            self._end.sendall(len(data).to_bytes(4, "little") + kind + data)
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise Gone from error

    def fail(self, failure: Failed) -> None:
        """Tell the other end of a failure, instead of what it waits for."""
        self.send(msgspec.json.encode((failure.failure, str(failure))), _FAILURE)

    def receive(self) -> bytes:
        """Return the next frame. Raises `Failed` if it is a failure or does not come in time, and
        `Gone` if the other end has ended.
        """
        data, size = self._rest, 5
        while True:
            if len(data) >= 5:
                size = 5 + int.from_bytes(data[:4], "little")
                if size > MAX_FRAME:
                    raise Failed("forged", f"{self._of}: its process says {size:,} bytes at once")
                if len(data) >= size:
                    break
            try:
                self._set_timeout()
                piece = self._end.recv(1 << 18)
            except TimeoutError as error:
                raise self._late() from error
            except OSError as error:
                raise Gone from error
            if not piece:
                raise Gone
            data += piece
        kind, frame, self._rest = data[4:5], data[5:size], data[size:]
        if kind == _VALUE:
            return frame
        try:
            raise Failed(*msgspec.json.decode(frame, type=tuple[str, str]))
        except msgspec.DecodeError as error:
            raise Failed("forged", f"{self._of}: its process says no failure") from error

    def _set_timeout(self) -> None:
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self._end.settimeout(left)

    def _late(self) -> Failed:
        return Failed("time", f"{self._of} was not done in time")


class Start(msgspec.Struct, frozen=True):
    """A candidate, and what its process is to do: a function of the module `jobs` by name."""

    source: str
    name: str
    job: str
    arguments: dict[str, Any]
    seconds: float
    megabytes: int


class Nursery:
    """The process from which candidates are forked, as the process that measures sees it. It was
    forked before the first task, and is told a candidate's text and job, and no more.
    """

    def __init__(self, jobs: Any) -> None:
        self._ours, theirs = socket.socketpair()
        if not os.fork():
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            self._ours.close()
            with suppress(BaseException):
                _nurse(theirs, jobs)
            os._exit(0)
        theirs.close()

    def start(self, start: Start, line: socket.socket) -> int:
        """Fork a candidate on this end of a line; returns the id of its process."""
        data = msgspec.json.encode(start)
        try:
            head = _BEGIN + len(data).to_bytes(4, "little")
            socket.send_fds(self._ours, [head], [line.fileno()])
            self._ours.sendall(data)
            return int.from_bytes(_exactly(self._ours, 4), "little")
        except (OSError, EOFError) as error:
            raise Lost("the process that candidates are forked from has ended") from error

    def end(self, pid: int, *, is_gone: bool) -> int:
        """End a candidate by the id of its process, unless it `is_gone` by itself; returns its wait
        status.
        """
        try:
            self._ours.sendall((_WAIT if is_gone else _KILL) + pid.to_bytes(4, "little"))
            return int.from_bytes(_exactly(self._ours, 4), "little")
        except (OSError, EOFError) as error:
            raise Lost("the process that candidates are forked from has ended") from error


def _nurse(line: socket.socket, jobs: Any) -> None:
    """Fork candidates and end them as often as this is asked for; all of them at the end."""
    alive: set[int] = set()
    try:
        while True:
            head, ends, _, _ = socket.recv_fds(line, 5, 1)
            word, number = head[:1], int.from_bytes(head[1:], "little")
            if word == _BEGIN:
                start = msgspec.json.decode(_exactly(line, number), type=Start)
                [end] = ends
                pid = os.fork()
                if not pid:
                    alive.clear()  # they are not this one's
                    os.dup2(end, 3)
                    os.closerange(4, 256)
                    _live(start, jobs, Channel(socket.socket(fileno=3)))
                os.close(end)
                alive.add(pid)
                line.sendall(pid.to_bytes(4, "little"))
            elif word in (_KILL, _WAIT):
                alive.discard(number)
                line.sendall(_end(number, is_gone=word == _WAIT).to_bytes(4, "little"))
            else:  # the process that asks has ended
                return
    finally:
        for pid in alive:
            _end(pid, is_gone=False)


def _end(pid: int, *, is_gone: bool) -> int:
    """End a process that was forked here, and return its wait status. One that `is_gone` has a
    second to end by itself: how it did is to be told.
    """
    for _ in range(100 if is_gone else 0):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _exactly(line: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = line.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


class Guest:
    """A candidate of a task, as a trial sees it: what its process is asked for, until the time of
    the task is up.
    """

    def __init__(self, nursery: Nursery, task: Task) -> None:
        self._nursery = nursery
        self._task = task
        self._deadline = time.monotonic() + task.seconds

    def beside(self, source: str, name: str) -> "Guest":
        """Return another candidate, which has what is left of the time."""
        seconds = max(self._deadline - time.monotonic(), 0.0)
        task = msgspec.structs.replace(self._task, source=source, name=name, seconds=seconds)
        return Guest(self._nursery, task)

    def do(self, job: str, **arguments: Any) -> Any:
        """Return what a job comes to in a process of its own. Raises `Failed`."""
        with self.started(job, **arguments) as (line, _):
            try:
                return msgspec.json.decode(line.receive())
            except msgspec.DecodeError as error:
                raise Failed("forged", f"{job}: its process says no result") from error

    @contextmanager
    def started(self, job: str, **arguments: Any) -> Iterator[tuple[Channel, int]]:
        """Yield a line to a new process of the candidate, and the id of that process, which ends
        with the block. Raises `Failed` for what the block raises as `Gone`.
        """
        task, seconds = self._task, max(self._deadline - time.monotonic(), 0.0)
        start = Start(task.source, task.name, job, arguments, seconds, task.megabytes)
        ours, theirs = socket.socketpair()
        is_gone, status = False, 0
        with ours:
            with theirs:
                pid = self._nursery.start(start, theirs)
            try:
                yield Channel(ours, self._deadline, task.trial), pid
            except Gone:
                is_gone = True
            finally:
                status = self._nursery.end(pid, is_gone=is_gone)
        if is_gone:
            code = os.waitstatus_to_exitcode(status)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise Failed("died", f"{task.trial}: the process ended with {how}")


# The life of a fork: limits, then the candidate's code, then the job.


def _live(start: Start, jobs: Any, line: Channel) -> NoReturn:
    def fail(failure: str, story: str) -> NoReturn:
        with suppress(Gone):
            line.fail(Failed(failure, story))
        os._exit(0)

    try:
        _limit(start)
        job: Callable[..., Any] = getattr(jobs, start.job)
        Hook(lambda story: fail("caught", story)).set()
        sys.meta_path.insert(0, _Finder(start.source, start.name))
        policy = jobs.policy_of(MODULE)
        if start.job == jobs.PLANNING:
            job(policy, line)
        line.send(msgspec.json.encode(job(policy, **start.arguments)))
        os._exit(0)
    except Failed as error:
        fail(error.failure, str(error))
    except Gone:
        os._exit(0)
    except MemoryError:
        fail("memory", f"it wanted more than {start.megabytes} MB")
    except AioserveError as error:
        cause = f": {error.__cause__!r}" if error.__cause__ is not None else ""
        fail("failed", f"{error}{cause}"[:4000])
    except BaseException as error:
        fail("failed", f"{type(error).__name__}: {error}"[:4000])


def _limit(start: Start) -> None:
    """Set the limits of the kernel: none of them can be raised again without privileges."""
    seconds = int(start.seconds) + 1
    for kind, most in (
        (resource.RLIMIT_AS, start.megabytes << 20),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),  # bytes of a file that is written
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 0),  # root alone is let through
    ):
        _, hard = resource.getrlimit(kind)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The finder of the candidate's module and of its package, which reads no file for them."""

    def __init__(self, source: str, name: str) -> None:
        self._source, self._name = source, name

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in (MODULE, MODULE.partition(".")[0]):
            return None
        return importlib.util.spec_from_loader(
            name, self, origin=self._name, is_package=name != MODULE
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ != MODULE:
            return
        import linecache

        module.__file__ = self._name
        lines = self._source.splitlines(keepends=True)
        linecache.cache[self._name] = (len(self._source), None, lines, self._name)
        exec(compile(self._source, self._name, "exec"), module.__dict__)  # noqa: S102 - that is the aim


#: Events of the interpreter that end a candidate's process, whichever code causes them.
NEVER = (
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.get"),
    *("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill"),
    *("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.chown", "os.chdir", "os.putenv", "shutil.", "tempfile.", "resource."),
    *("urllib.", "http.", "ftplib.", "smtplib.", "sqlite3.", "pty.", "mmap.", "fcntl."),
    *("signal.", "sys.addaudithook", "cpython.run_", "webbrowser.", "os.setxattr"),
)
#: Events that the lab and the kit cause as well: the process ends if the candidate's code does.
NOT_BY_A_POLICY = (
    *("gc.", "sys._getframe", "sys._current_", "sys.settrace", "sys.setprofile", "ctypes."),
    *("os.listdir", "os.scandir", "exec", "compile", "code.__new__", "object.__", "marshal."),
    *("pickle.", "time.", "builtins.", "os."),
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Hook:
    """An audit hook (PEP 578) that ends the process, which no `except` sees, at the first event
    that a policy causes and has no use for; where none of its code is running, the event is
    refused. It is a tripwire: it sees what the interpreter tells it.
    """

    def __init__(self, end: Callable[[str], NoReturn]) -> None:
        self._end = end
        self._is_busy = False
        roots = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
        roots |= {str(Path(__file__).parents[2]), str(configs_folder())}
        policies = importlib.util.find_spec("aioserve.policies")
        roots |= set(policies.submodule_search_locations or () if policies is not None else ())
        self._roots = tuple(os.path.realpath(root) + os.sep for root in roots)

    def set(self) -> None:
        """From here on the process ends at the first such event."""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_busy:
            return
        self._is_busy = True
        try:
            if why := self._why(event, arguments):
                if place := _place():
                    self._end(why + place)
                raise PermissionError(why)  # a library asks for itself, and can do without
        finally:
            self._is_busy = False

    def _why(self, event: str, arguments: tuple[Any, ...]) -> str:
        """Return why the process ends; "" if it does not."""
        if event == "open":
            path, _, flags = arguments
            if self._may_read(path, flags):
                return ""
            return f"it opens the file {path!r}"
        if event.startswith(NEVER):
            return f"it causes {event}{arguments!r:.200}"
        if event == "import":
            importer = _importer()
            if importer is not None and _is_candidate(importer) and arguments[0] not in MODULES:
                return f"it imports {arguments[0]}"
            return ""
        if event.startswith(NOT_BY_A_POLICY) and _is_candidate(sys._getframe(2)):
            return f"it causes {event}"
        return ""

    def _may_read(self, path: Any, flags: Any) -> bool:
        """Return whether a file is opened to be read and is one of Python's or aioserve's own, or
        is not there: the import system asks for some of which it only knows afterwards.
        """
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str) or (isinstance(flags, int) and flags & WRITES):
            return False
        return os.path.realpath(path).startswith(self._roots) or not os.path.lexists(path)


def _is_candidate(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == MODULE


def _importer() -> FrameType | None:
    """Return the frame that imports, behind the hook's own two and those of the import system."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame


def _place() -> str:
    """Return the line of the candidate that is running, in words."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_candidate(frame):
            return f" ({frame.f_code.co_filename}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
