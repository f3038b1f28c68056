"""The errors of the kit, and what turns an error or a hang of a policy's call into one of them.

A call that does not come back is ended: by an exception in the thread that makes it, where it
stands.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from aioserve.errors import AioserveError, CallInterrupted, PolicyError
from aioserve.scheduler.blame import place


class ContractViolation(AssertionError):
    """A scheduler broke a rule; the message names the rule, the step and the request."""


class FormatViolation(AssertionError):
    """A format of replies broke a rule; the message names the rule and the text."""


class RouterViolation(AssertionError):
    """A router broke a rule; the message names the rule, and a replica or request."""


class StepTimesViolation(AssertionError):
    """A step-time source broke a rule; the message names the rule and two steps."""


class Starvation(ContractViolation):
    """A request is never served, or never to its end."""


class HashOrder(ContractViolation):
    """The same events give other plans in a process where strings have other hashes."""


class NoReturn(ContractViolation):
    """A call of the policy did not come back in its time: it was ended from outside."""


# Ends a call that does not come back: raises in the thread that makes it, where it stands. Knows
# threads and looks. A thread looks at all calls and counts its own looks, not time: a process that
# was stopped as a whole has not hung. What holds the interpreter's lock for ever stops it, too.


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
        self._begin_anew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_anew)  # a fork leaves its thread behind

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()
        self._calls: set[TimedCall] = set()
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> TimedCall:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="aioserve-time-limit", daemon=True)
            thread.start()  # if it cannot start now, the next call tries again
            self._thread = thread
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
    """End the time of a call; `was_ended` says whether it took too long."""
    try:
        _WATCHER.end(call)
    except (OutOfTime, KeyboardInterrupt):  # it came as the call ended by itself
        _WATCHER.end(call)
        if not call.was_ended:  # Ctrl-C sent this interrupt
            raise
    if call.was_ended:
        with suppress(OutOfTime, KeyboardInterrupt):
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


# Stands around calls of a policy: an error in one, and one that takes too long, is its fault. Knows
# errors and the line that raised them. Knows nothing about requests or steps.


class Guard:
    """A guard that turns what a call of the policy raises into a `ContractViolation`."""

    def __init__(self, call_seconds: float, where: Callable[[], str]) -> None:
        """A call may take `call_seconds` of real time; `where` is the step that is named."""
        self._call_seconds = call_seconds
        self._where = where

    @contextmanager
    def blame(self, policy: type, method: str) -> Iterator[None]:
        """An exception that is no message of ours is the scheduler's fault."""
        try:
            with self.timed(policy, method):
                yield
        except (AioserveError, ContractViolation) as error:
            cause = error.__cause__
            is_door = method == "add_request"
            if is_door or not isinstance(error, PolicyError) or cause is None:
                raise
            if isinstance(cause, AioserveError):  # it says itself what is wrong
                raise cause from cause.__cause__
            raise ContractViolation(
                f"{self._where()}: {policy.__name__} raised {cause!r} in {method}()"
            ) from cause
        except Exception as error:
            raise ContractViolation(
                f"{self._where()}: {policy.__name__} raised {error!r} in {method}()"
            ) from error

    @contextmanager
    def timed(self, policy: type, method: str) -> Iterator[None]:
        """What the policy is asked in the block has so long, and then breaks the contract."""
        call = begin_call(self._call_seconds)
        ended_by: BaseException | None = None
        try:
            yield
        except (OutOfTime, KeyboardInterrupt) as error:
            if not call.was_ended:
                raise
            ended_by = error
        finally:
            end_call(call)
        if call.was_ended:  # also one that swallowed what ended it
            where = "" if ended_by is None else place(ended_by, policy)
            raise NoReturn(
                f"{self._where()}: {policy.__name__} did not come back from {method}() in "
                f"{self._call_seconds:g} s{where}"
            ) from ended_by
