"""Runs a policy file of a stranger, or of a program, in a process of its own that can be ended.

Two lines stand around it. `look` reads the file without running it and refuses what a policy has no
use for: modules beside `aioserve.scheduler` and a few of the standard library, names that lead into
the interpreter. What passes runs in a fork of a process that was started for it: with an empty
folder, an empty environment, limits of the kernel on memory, time, files and processes, no network
where the kernel gives user namespaces, and a hook that ends the process at the first file, socket
or process that it asks for. docs/evolve.md says what that does not stop.
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
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
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
    """A trial of a candidate: a function of the module `trials` by name, and its arguments."""

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
    #: (it raised), "foresight", "caught" (it reached for something), "time", "memory" or "died".
    failure: str = ""
    story: str = ""


class Failed(Exception):
    """A candidate has failed: what `failure` of a verdict says, and the story."""

    def __init__(self, failure: str, story: str) -> None:
        super().__init__(story)
        self.failure = failure


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


# The process that candidates are forked from. It is asked over its input, a line of JSON each.


_START = """
import ctypes, json, sys
NEW_USER, NEW_NET = 0x10000000, 0x40000000
has_network = ctypes.CDLL(None).unshare(NEW_USER | NEW_NET) != 0
sys.path[:0] = json.loads(sys.argv[1])
from aioserve.lab.evaluate import trials
from aioserve.lab.evaluate.enclosure import serve
serve(has_network, trials)
"""


class Enclosure:
    """A process that does one task after another, each in a fork of its own. Use it in a `with`.

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
                pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, task: Task) -> Verdict:
        """Do a task; returns when it is done, has failed, or was ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(task) + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._gone() from error
        return self._answer(task.seconds + BOOT_SECONDS)

    def _answer(self, seconds: float) -> Verdict:
        """Return the next line that the process says. Its own limit comes first."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            raise AioserveError(f"the process of the candidates said nothing for {seconds:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        return msgspec.json.decode(line, type=Verdict)

    def _gone(self) -> AioserveError:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip()
        return AioserveError(f"the process of the candidates has ended: {said[-2000:]}")


def serve(has_network: bool, trials: Any) -> None:
    """Do the tasks that come on stdin, until it is closed: the life of the process. `trials` is the
    module whose functions tasks name; its `warm_up`, `prepare` and `policy_of` are called besides.
    """
    line = os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    trials.warm_up()
    gc.collect()
    gc.freeze()  # forks share what is there: to count references in it would copy it
    line.write(msgspec.json.encode(Verdict(value=has_network)) + b"\n")
    for asked in sys.stdin.buffer:
        verdict = _forked(msgspec.json.decode(asked, type=Task), trials, nothing)
        line.write(msgspec.json.encode(verdict) + b"\n")


def _forked(task: Task, trials: Any, nothing: int) -> Verdict:
    """Do a task in a fork, which is ended when its time is over."""
    ours, its = os.pipe()
    pid = os.fork()
    if not pid:
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.dup2(its, 3)
        os.closerange(4, 256)
        _live(task, trials, 3)
    os.close(its)
    end, data, is_late = time.monotonic() + task.seconds, b"", False
    while True:
        left = end - time.monotonic()
        if left <= 0 or not select.select([ours], [], [], left)[0]:
            is_late = True
            break
        piece = os.read(ours, 1 << 16)
        if not piece:
            break
        data += piece
    os.close(ours)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if is_late:
        return Verdict(failure="time", story=f"{task.trial} was not done in {task.seconds:g} s")
    try:
        return msgspec.json.decode(data, type=Verdict)
    except msgspec.DecodeError:
        how = f"signal {status & 0x7F}" if status & 0x7F else f"exit code {status >> 8}"
        return Verdict(failure="died", story=f"{task.trial}: the process ended with {how}")


# The life of a fork: limits, then the candidate's code, then the trial.


def _live(task: Task, trials: Any, answer: int) -> NoReturn:
    def tell(verdict: Verdict) -> NoReturn:
        data = msgspec.json.encode(verdict)
        while data:
            data = data[os.write(answer, data) :]
        os._exit(0)

    try:
        _limit(task)
        trial: Callable[..., Any] = getattr(trials, task.trial)
        prepared = trials.prepare(task.trial, task.arguments)
        Hook(lambda story: tell(Verdict(failure="caught", story=story))).set()
        sys.meta_path.insert(0, _Finder(task.source, task.name))
        tell(Verdict(value=trial(trials.policy_of(MODULE), **prepared)))
    except Failed as error:
        tell(Verdict(failure=error.failure, story=str(error)))
    except MemoryError:
        tell(Verdict(failure="memory", story=f"it wanted more than {task.megabytes} MB"))
    except BaseException as error:
        tell(Verdict(failure="failed", story=f"{type(error).__name__}: {error}"[:4000]))


def _limit(task: Task) -> None:
    """Set the limits of the kernel: none of them can be raised again without privileges."""
    seconds = int(task.seconds) + 1
    for kind, most in (
        (resource.RLIMIT_AS, task.megabytes << 20),
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
