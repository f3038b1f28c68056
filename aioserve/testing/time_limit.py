"""Ends a call that does not come back: raises in the thread that makes it, where it stands.

Knows threads and looks. A thread looks at all calls and counts its own looks, not time: a process
that was stopped as a whole has not hung. What holds the interpreter's lock for ever stops it, too.
"""

import ctypes
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

from aioserve.errors import CallInterrupted

#: A call of a policy takes microseconds: one that takes so long does not come back.
CALL_SECONDS = 10.0
LOOK_SECONDS = 0.1
#: Modules on the stack of a thread that a debugger holds: it may stand as long as it likes.
DEBUGGERS = ("bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy")


class OutOfTime(CallInterrupted):
    """A call of a policy took too long, and is ended by the thread that looks at all calls."""


@dataclass(slots=True, eq=False)
class TimedCall:
    """The call that is being made."""

    thread_id: int
    seconds: float
    num_looks: int = 0
    was_ended: bool = False


class _Watcher:
    """Looks at every call of this process that is being made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[TimedCall] = set()
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> TimedCall:
        if self._thread is None or not self._thread.is_alive():  # at first, and after a fork
            self._thread = threading.Thread(
                target=self._run, name="aioserve-time-limit", daemon=True
            )
            self._thread.start()
        call = TimedCall(threading.get_ident(), seconds)
        with self._lock:
            self._calls.add(call)
        return call

    def end(self, call: TimedCall) -> None:
        with self._lock:
            self._calls.discard(call)

    def _run(self) -> None:
        while True:
            threading.Event().wait(LOOK_SECONDS)
            with self._lock:
                for call in self._calls:
                    self._look(call)

    def _look(self, call: TimedCall) -> None:
        if _is_debugged(call.thread_id):
            call.num_looks = 0
            return
        call.num_looks += 1
        if call.num_looks * LOOK_SECONDS >= call.seconds:
            call.num_looks, call.was_ended = 0, True  # and again, if it goes on nevertheless
            _interrupt(call.thread_id)


_WATCHER = _Watcher()


def begin_call(seconds: float) -> TimedCall:
    """From here on this thread has `seconds` seconds, up to `end_call`. Beyond them, `OutOfTime` or
    `KeyboardInterrupt` is raised in it.
    """
    return _WATCHER.begin(seconds)


def end_call(call: TimedCall) -> None:
    """It is over; `was_ended` says whether it took too long."""
    with suppress(OutOfTime, KeyboardInterrupt):  # one that came as the call ended by itself
        _WATCHER.end(call)
        if call.was_ended:
            _take_interrupt()


def _take_interrupt() -> None:
    """Have this thread receive an interrupt that may still be on its way to it, here."""
    # To set none in its place would leave a flag of CPython 3.11 set: the next function that a
    # debugger traces would not return. So another one takes its place, and is received.
    with suppress(OutOfTime):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(threading.get_ident()), ctypes.py_object(OutOfTime)
        )
        while True:
            with suppress(KeyboardInterrupt):
                while True:
                    pass


def _is_debugged(thread_id: int) -> bool:
    frame = sys._current_frames().get(thread_id)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _interrupt(thread_id: int) -> None:
    """Raise in the thread, in the midst of Python code. In the main thread this ends a sleep and a
    wait for a lock as well, as Ctrl-C does; in any other they come back first.
    """
    is_main = thread_id == threading.main_thread().ident
    if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        if sys.platform != "win32":
            signal.pthread_kill(thread_id, signal.SIGINT)
    else:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread_id), ctypes.py_object(OutOfTime)
        )
