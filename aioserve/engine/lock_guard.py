"""Ends a process in which a C function has taken the interpreter's lock and keeps it for ever.

No Python code runs then: no signal handler, no thread that watches, no line of a log. What acts
here is the system and the C library alone, set up in advance and put off as long as Python runs.
Knows timers and signals; knows nothing about engines.
"""

import ctypes
import faulthandler
import signal
import sys

# Seconds between the warning and the end, in which a process can say that it lives: one that was
# stopped as a whole finds its time over when it goes on. Longer than between two renewals.
GRACE_SECONDS = 2
# Longer than that: an alarm that is set takes the place of one that has not gone off.
STACKS_SECONDS = GRACE_SECONDS + 1  # for the stacks to be written


class LockGuard:
    """A guard that writes all stacks to stderr and ends the process by SIGALRM, once it has not
    been renewed for some time. A process has one, which takes SIGALRM for itself.

    It counts time twice, so that a process that was stopped (SIGSTOP, a frozen container) and goes
    on is not ended: first `seconds`, then `GRACE_SECONDS` that begin when the process runs. Where
    what reads stderr stands still, the stacks are written in part, and the process ends
    `STACKS_SECONDS` later.
    Where the C library has no timers that call a function (macOS), `faulthandler` ends the process
    with exit code 1, also if it was stopped for so long.
    """

    def __init__(self, seconds: float, *, has_timers: bool = sys.platform == "linux") -> None:
        self._seconds = seconds
        self._timers: list[_Timer] = []
        if has_timers:
            # While the process is stopped, an alarm would pass as well: it begins with the end of
            # the first timer, on a thread of the C library's own.
            faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
            self._words = ctypes.create_string_buffer(
                f"no Python code has run for {seconds:g} s (server.dead_loop_seconds): unless some "
                f"does, the process ends in {GRACE_SECONDS} s, by SIGALRM, with its stacks".encode()
            )
            self._timers = [
                _Timer("alarm", GRACE_SECONDS),
                _Timer("warnx", ctypes.addressof(self._words)),
            ]
            # A full pipe holds the first SIGALRM while it writes the stacks. At a second one
            # `faulthandler` writes nothing, and passes on to the end of the process.
            self._second = _Timer("alarm", GRACE_SECONDS)
        self.renew()

    def renew(self) -> None:
        """Python runs: the time begins anew. More often than every `GRACE_SECONDS`."""
        if not self._timers:
            faulthandler.dump_traceback_later(self._seconds + GRACE_SECONDS, exit=True)
            return
        for timer in self._timers:
            timer.set(self._seconds)
        self._second.set(self._seconds + STACKS_SECONDS)
        signal.alarm(0)

    def close(self) -> None:
        """Nothing ends the process any more."""
        if not self._timers:
            faulthandler.cancel_dump_traceback_later()
            return
        for timer in (*self._timers, self._second):
            timer.close()
        signal.alarm(0)
        faulthandler.unregister(signal.SIGALRM)


# What follows is of time.h and signal.h on Linux.

_CLOCK_MONOTONIC = 1
_SIGEV_THREAD = 2


class _Event(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    )


class _Times(ctypes.Structure):
    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class _Timer:
    """A timer that calls a function of the C library with one argument, on a thread unknown to
    Python.
    """

    def __init__(self, function: str, argument: int) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        address = ctypes.cast(getattr(self._library, function), ctypes.c_void_p)
        event = _Event(value=argument, notify=_SIGEV_THREAD, function=address)
        self._timer = ctypes.c_void_p()
        code = self._library.timer_create(
            _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)
        )
        if code:
            raise OSError(ctypes.get_errno(), "the system has no timer for the last resort")

    def set(self, seconds: float) -> None:
        """Call the function once, `seconds` from now; an earlier time that was set is forgotten."""
        whole = int(seconds)
        times = _Times(value_s=whole, value_ns=int((seconds - whole) * 1e9))
        self._library.timer_settime(self._timer, 0, ctypes.byref(times), None)

    def close(self) -> None:
        self._library.timer_delete(self._timer)
