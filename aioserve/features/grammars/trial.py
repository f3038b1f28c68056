"""Tries each grammar in a process of its own before the engine's process compiles it.

A grammar is a program that comes with a request, and the library that reads it is native code:
given the wrong text it takes a gigabyte, runs for minutes, or ends its process. So each is first
compiled, copied and followed for a few tokens in a process that is forked for it alone, with limits
that the kernel keeps: processor time, time, address space, stack. Whatever becomes of that process
is an error of one request. The first grammar starts the process from which the others are forked;
it has the tokenizer and stays.

What a trial proves: the same library made a matcher of the same text, tokenizer and limits, in this
much memory and time, and with half the stack that the engine's compiling thread has. The engine
compiles the text that the trial has translated, so nothing of a request is read twice.
What it cannot prove is the way that a reply takes: a lexer makes its states as the text needs them.
There `LIMITS` bound each mask, `grammar_rows` bounds the time and the memory of a reply's masks,
and `is_slow` tells it of grammars for which calls that hold the GIL take long.
"""

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from aioserve.config import StructuredOutputsConfig
from aioserve.errors import EngineOverloadedError, first_line
from aioserve.features.grammars.translation import grammar_of, reason_of
from aioserve.params import StructuredOutputs
from aioserve.support.process import LOOK_SECONDS, ProcessWatch, StandsStillError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TRIAL_SECONDS = 2.0  # of processor time; a schema takes a few milliseconds
PATIENCE_SECONDS = 10.0  # of time, however busy the machine is
START_SECONDS = 60.0  # in which the process is there and has made a trial
MAX_GRAMMAR_BYTES = 32 << 20  # that a grammar may take at any time of its trial
WALK_STACK_BYTES = 4 << 20  # half of what threads have that make masks
WALK_TOKENS, WALK_SECONDS = 8, 0.02
SLOW_SECONDS = 0.004  # of a call that holds the GIL, or ten times that for a mask

# What the process needs to find Python and its libraries; what else there is may be secret.
ENVIRONMENT = ["HOME", "LANG", "LC_ALL", "PATH", "LD_LIBRARY_PATH", "PYTHONHOME"]
_ONE_THREAD = {"MALLOC_ARENA_MAX": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
_HEAD = struct.Struct("<q")  # bytes that follow; below 0: the exit code less 1 of a trial


class Setup(msgspec.Struct, frozen=True):
    """The setup that all trials of a process share."""

    tokenizer: str  # of the library tokenizers, as JSON
    vocab_size: int
    eos_token_ids: list[int]
    limits: dict[str, Any]  # of llguidance
    stack_bytes: int  # for compiling
    seconds: float = TRIAL_SECONDS
    num_bytes: int = MAX_GRAMMAR_BYTES
    settings: StructuredOutputsConfig = StructuredOutputsConfig()


class Verdict(msgspec.Struct, frozen=True):
    """The verdict of a trial on a grammar."""

    error: str = ""  # why it cannot be, or cannot be followed; all else is empty then
    text: str = ""  # the grammar as the library reads it
    num_bytes: int = 0  # that the matcher takes
    num_copy_bytes: int = 0  # that a copy of it takes once it has made a mask
    is_slow: bool = False  # a call that holds the GIL took long


class Trials:
    """Tries grammars for one tokenizer. It blocks the caller, which must be no event loop."""

    def __init__(self, make_setup: Callable[[], Setup]) -> None:
        """`make_setup` is called when the first grammar comes."""
        self._make_setup = make_setup
        self._lock = threading.Lock()
        self._processes: list[_Process] = []  # one at most
        self.close = weakref.finalize(self, _end_all, self._processes)

    def run(self, wanted: bytes) -> Verdict:
        """Try `StructuredOutputs`, given as JSON. A trial that ends its process is a verdict as
        well. Raises `EngineOverloadedError` if there is no process, or no time, for one.
        """
        for is_last in (False, True):
            process = self._process()
            try:
                return _verdict(process.ask(wanted))
            except (OSError, EOFError, StandsStillError) as error:
                # Another process may have ended or stopped it while there was nothing to do.
                self._drop(process)
                if is_last:
                    raise EngineOverloadedError(
                        f"no process can be started in which grammars are tried: {error}"
                    ) from error
        raise AssertionError

    def _process(self) -> "_Process":
        with self._lock:
            if not self._processes:
                try:
                    process = _Process(self._make_setup())
                except OSError as error:
                    raise EngineOverloadedError(
                        f"no process can be started in which grammars are tried: {error}"
                    ) from error
                self._processes.append(process)
                if not self.close.alive:  # meanwhile
                    _end_all(self._processes)
                    raise EngineOverloadedError("the engine is closed")
            return self._processes[0]

    def _drop(self, process: "_Process") -> None:
        with self._lock:
            if process in self._processes:
                self._processes.remove(process)
        process.end()


def _verdict(answer: "bytes | int") -> Verdict:
    """Return what the answer of a trial means, or the exit code of one that has ended without."""
    if isinstance(answer, bytes):
        return msgspec.msgpack.decode(answer, type=Verdict)
    if answer == -signal.SIGALRM:
        raise EngineOverloadedError(
            f"the machine has no time for the grammar: it was tried for {PATIENCE_SECONDS:g} s"
        )
    if answer == -signal.SIGPROF:
        return Verdict(f"takes more than {TRIAL_SECONDS:g} s of processor time to compile")
    if answer in (-signal.SIGABRT, -signal.SIGKILL):  # the library has no other way to say so
        return Verdict(f"takes more than {MAX_GRAMMAR_BYTES >> 20} MiB of memory to compile")
    how = f"exit code {answer}"
    if answer < 0:
        with contextlib.suppress(ValueError):  # a number without a name
            how = signal.Signals(-answer).name
    return Verdict(f"ends the process that compiles it ({how}): it is nested too deeply, or wrong")


class _Process:
    """The process that trials are forked from, seen from the engine's."""

    def __init__(self, setup: Setup) -> None:
        self._line, theirs = socket.socketpair()
        try:
            with theirs:
                environment = {n: os.environ[n] for n in ENVIRONMENT if n in os.environ}
                here = [os.path.abspath(path) for path in sys.path]
                environment["PYTHONPATH"] = os.pathsep.join([*here, str(Path(__file__).parents[3])])
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "aioserve.features.grammars.trial",
                        str(theirs.fileno()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # last words of libraries; the exit code tells all
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for this process, which drains first
                    env=environment | _ONE_THREAD,
                )
        except BaseException:
            self._line.close()
            raise
        self._asking = threading.Lock()
        try:
            data = msgspec.msgpack.encode(setup)
            self._line.settimeout(PATIENCE_SECONDS)
            self._line.sendall(_HEAD.pack(len(data)) + data)
        except OSError:
            self.end()
            raise

    def ask(self, wanted: bytes) -> bytes | int:
        """Return the answer of a trial, or its exit code. Raises `OSError`, `EOFError`, or
        `StandsStillError` if the process is stopped.
        """
        mine, theirs = socket.socketpair()
        with mine:
            # Its start takes seconds with a large vocabulary, and comes before the first trial.
            watch = ProcessWatch(self._process.pid, START_SECONDS)
            mine.settimeout(LOOK_SECONDS)
            with theirs, self._asking:
                socket.send_fds(self._line, [b"T"], [theirs.fileno()])
            rest = memoryview(_HEAD.pack(len(wanted)) + wanted)
            while rest:
                rest = rest[watch.wait(partial(mine.send, rest)) :]
            (size,) = _HEAD.unpack(_read(mine, _HEAD.size, watch))
            return _read(mine, size, watch) if size >= 0 else size + 1

    def end(self) -> None:
        """Idempotent; takes no longer than to be killed."""
        self._line.close()
        self._process.kill()
        self._process.wait()


def _end_all(processes: list[_Process]) -> None:
    while processes:
        processes.pop().end()


def _read(line: socket.socket, size: int, watch: ProcessWatch | None = None) -> bytes:
    data = bytearray()
    while len(data) < size:
        receive = partial(line.recv, min(size - len(data), 1 << 20))
        if not (piece := receive() if watch is None else watch.wait(receive)):
            raise EOFError("it has ended")
        data += piece
    return bytes(data)


# What follows runs in the process of trials, and in those forked from it.


def main(file: int) -> None:
    """Fork a trial for each socket that comes over the socket `file`, until that is closed."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = {signal.SIGPROF, signal.SIGALRM}  # each ends the process, whatever it is doing
    for number in limits:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, limits | {signal.SIGCHLD})
    line = socket.socket(fileno=file)
    try:
        (size,) = _HEAD.unpack(_read(line, _HEAD.size))
        trial = _Trial(msgspec.msgpack.decode(_read(line, size), type=Setup))
    except EOFError:
        return
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    asked: dict[int, socket.socket] = {}  # by process id of the trial
    while True:
        ready, _, _ = select.select([line, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _tell_ends(asked)
        if line not in ready:
            continue
        data, files, _, _ = socket.recv_fds(line, 1, 1)
        if not data:
            return
        own = socket.socket(fileno=files[0])
        try:
            pid = os.fork()
        except OSError:
            own.close()  # which tells that there was none
            continue
        if pid:
            asked[pid] = own
        else:
            line.close()
            trial.run(own)


def _tell_ends(asked: dict[int, socket.socket]) -> None:
    """Tell how trials have ended; those that have answered before are not listened to any more."""
    while asked:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with asked.pop(pid) as line, contextlib.suppress(OSError):
            line.sendall(_HEAD.pack(min(os.waitstatus_to_exitcode(status), 0) - 1))


class _Trial:
    """All that trials share; `run` is one of them, in a process forked for it."""

    def __init__(self, setup: Setup) -> None:
        from tokenizers import Tokenizer

        from aioserve.features.grammars.tokenizer import matching_tokenizer, text_tokens

        backend = Tokenizer.from_str(setup.tokenizer)
        tokenizer = SimpleNamespace(backend_tokenizer=backend)
        self._setup = setup
        self._vocab_size, self._eos = setup.vocab_size, setup.eos_token_ids
        self._tokenizer: LLTokenizer = matching_tokenizer(tokenizer, setup.vocab_size, self._eos)
        self._text_tokens = text_tokens(tokenizer, self._eos)
        self._wanted = StructuredOutputs(json_object=True)  # what is tried
        self._grammar: tuple[str, LLMatcher] | None = None
        self._error = ""
        self._seconds: list[float] = []  # of calls that hold the GIL
        self._copies: list[LLMatcher] = []
        self.run_once(b'{"json":{"type":"object"}}')  # what is made on first use is, then
        gc.collect()
        gc.freeze()  # a trial shares these pages as long as it does not write to them
        gc.disable()
        _trim()

    def run(self, line: socket.socket) -> NoReturn:
        """Try what comes over `line`, answer, and end the process."""
        import resource

        code = 1
        try:
            (size,) = _HEAD.unpack(_read(line, _HEAD.size))
            wanted = _read(line, size)
            if sys.platform == "linux":  # elsewhere the system may keep no such limit
                most = _pages()[0] + self._setup.num_bytes
                most += self._setup.stack_bytes + WALK_STACK_BYTES
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            signal.setitimer(signal.ITIMER_PROF, self._setup.seconds)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)
            verdict = self.run_once(wanted)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            data = msgspec.msgpack.encode(verdict)
            line.sendall(_HEAD.pack(len(data)) + data)
            code = 0
        except MemoryError:
            os.abort()  # as the library tells of it
        finally:
            os._exit(code)

    def run_once(self, wanted: bytes) -> Verdict:
        """Try `wanted` here, without limits of this process. Raises `MemoryError`."""
        self._forget()
        before = _pages()[1]
        _on_thread(self._setup.stack_bytes, lambda: self._compile(wanted))
        if self._grammar is None:
            return Verdict(self._error)
        text, matcher = self._grammar
        _on_thread(WALK_STACK_BYTES, lambda: self._first_mask(matcher))
        compiled = _pages()[1]
        _on_thread(WALK_STACK_BYTES, lambda: self._walk(matcher))
        walked = _pages()[1]
        if self._error:
            return Verdict(self._error)
        return Verdict(
            "",
            text,
            max(compiled - before, 0),
            max(walked - compiled, 0) // len(self._copies),
            max(self._seconds) > SLOW_SECONDS,
        )

    def _forget(self) -> None:
        self._grammar, self._error, self._seconds = None, "", []
        self._copies.clear()

    def _compile(self, wanted: bytes) -> None:
        from llguidance import LLMatcher, LLParserLimits

        from aioserve.features.grammars.tokenizer import with_ids

        self._wanted = msgspec.json.decode(wanted, type=StructuredOutputs)
        try:
            text = grammar_of(self._wanted, self._setup.settings)
            text = with_ids(text, self._text_tokens)
        except (ValueError, TypeError, RecursionError) as error:
            self._error = first_line(str(error))
            return
        limits = LLParserLimits(**self._setup.limits)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        self._grammar = text, matcher
        self._note(matcher)

    def _first_mask(self, matcher: "LLMatcher") -> None:
        began = time.thread_time()
        matcher.compute_bitmask()
        self._seconds.append((time.thread_time() - began) / 10)
        self._note(matcher)

    def _walk(self, matcher: "LLMatcher") -> None:
        """Follow two copies for some tokens that they allow, as rows of a batch do."""
        began = time.thread_time()
        for choice in (0, -1):
            row = self._timed(matcher.deep_copy)
            self._copies.append(row)
            for _ in range(WALK_TOKENS):
                if row.is_stopped() or time.thread_time() - began > WALK_SECONDS:
                    break
                self._timed(row.compute_ff_tokens)
                self._first_mask(row)
                allowed = self._allowed(row)
                if self._error or not allowed:
                    return
                token_id = allowed[choice]
                self._timed(partial(row.consume_tokens, [token_id]))
                self._note(row)

    def _allowed(self, row: "LLMatcher") -> list[int]:
        """Return the first and the last token that may come next, and end nothing."""
        mask = int.from_bytes(row.compute_bitmask(), "little") & ((1 << self._vocab_size) - 1)
        for token_id in self._eos:
            mask &= ~(1 << token_id)
        if not mask:
            return []
        return [(mask & -mask).bit_length() - 1, mask.bit_length() - 1]

    def _timed(self, call: Callable[[], Any]) -> Any:
        began = time.thread_time()
        result = call()
        self._seconds.append(time.thread_time() - began)
        return result

    def _note(self, matcher: "LLMatcher") -> None:
        if matcher.is_error() and not self._error:
            self._error = reason_of(matcher.get_error(), self._wanted)
            self._grammar = None


def _on_thread(stack_bytes: int, call: Callable[[], None]) -> None:
    """Run `call` on a thread with such a stack. Raises what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    before = threading.stack_size(stack_bytes)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    except RuntimeError as error:  # there is no memory for its stack
        raise MemoryError from error
    finally:
        threading.stack_size(before)
    thread.join()
    if raised:
        raise raised[0]


def _pages() -> tuple[int, int]:
    """Return bytes of address space, and of memory that is this process's own; 0 where Linux is
    not.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            size, resident, shared = map(int, file.read().split()[:3])
    except OSError:
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return size * page, (resident - shared) * page


def _trim() -> None:
    """Give free memory back, so that what a trial takes is seen."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
