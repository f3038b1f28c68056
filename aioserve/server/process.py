"""The process of a server: what signals mean, how it is made to end, what systemd is told.

Signals are events for the server's loop, with a limit of time after each.
"""

import asyncio
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from aioserve.engine.watchdog import LOG_SECONDS, frame_of, log_within, stacks_of_runners, told
from aioserve.errors import AioserveError
from aioserve.support.arguments import EXIT_ENGINE_DEAD

logger = logging.getLogger(__name__)

# Seconds that the process may take to end after a signal while it loads, when there is no request
# to lose and a thread may import torch for long; after the drain; after a second signal; after all
# is closed; and then where the engine has died. All but the first are longer than what each waits
# for by itself (handlers, workers, ranks, logs on a slow disk), and shorter than the unit of
# systemd allows.
LOADING_SECONDS = 1.0
ENDING_SECONDS = 10.0
SECOND_SECONDS = 5.0
EXIT_SECONDS = 5.0
DEAD_SECONDS = 1.0


class Signals:
    """SIGINT and SIGTERM as events, SIGHUP as calls; the handlers stay until the process ends.

    A second signal ends the process in any case, and a third one at once, also if the loop stands
    still.
    """

    def __init__(self) -> None:
        """On the main thread, in its loop. The server counts as loading."""
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._on_hangup: tuple[Callable[[], None], ...] = ()
        self._has_hung_up = False  # before `call_on_hangup`
        self._drain_timeout: float | None = None  # None: it loads
        loop = asyncio.get_running_loop()
        for number in ENDING_SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        self.last_resort = LastResort(self._count)

    def has_loaded(self, drain_timeout: float) -> None:
        """From now on there are requests, with `drain_timeout` seconds after a first signal."""
        self._drain_timeout = drain_timeout

    def call_on_hangup(self, *reloads: Callable[[], None]) -> None:
        """From now on SIGHUP calls these; at once, if it has come before. What raises has changed
        nothing.
        """
        self._on_hangup = reloads
        if self._has_hung_up:
            self._hang_up()

    def leave(self, *, is_dead: bool) -> None:
        """All is closed: whatever thread is still at something, the process ends soon."""
        seconds, exit_code = (DEAD_SECONDS, EXIT_ENGINE_DEAD) if is_dead else (EXIT_SECONDS, 0)
        why = "all is closed, but a thread is still at work"
        self.last_resort.end_within(seconds, exit_code, why)

    def _hang_up(self) -> None:
        self._has_hung_up = True
        for reload in self._on_hangup:
            try:
                reload()
            except AioserveError as error:
                logger.error("SIGHUP: %s; what was set before goes on", error)

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def _count(self, count: int) -> None:
        """On a thread of its own: the loop may stand still."""
        last_resort, drain_timeout = self.last_resort, self._drain_timeout
        if drain_timeout is None:
            if count > 1:
                last_resort.end(0, "interrupted again while the model was being loaded")
            self._say("interrupted while the model is being loaded: the server ends")
            last_resort.end_within(LOADING_SECONDS, 0)
        elif count == 1:
            seconds = drain_timeout + ENDING_SECONDS
            self._say(f"interrupted: ends in {seconds:g} s at most; again to drop what still runs")
            last_resort.end_within(seconds, EXIT_ENGINE_DEAD, "the drain has not ended in its time")
        elif count == 2:
            self._say(f"interrupted twice: ends in {SECOND_SECONDS:g} s; again to end at once")
            why = "what still runs could not be dropped"
            last_resort.end_within(SECOND_SECONDS, EXIT_ENGINE_DEAD, why)
        else:
            last_resort.end(EXIT_ENGINE_DEAD, "interrupted three times")

    @staticmethod
    def _say(what: str) -> None:
        log_within(LOG_SECONDS, logger.warning, "%s", what)


# Ends the process when its event loop or a thread would keep it for ever. It is a thread of its own
# that hears signals and deadlines. Knows signals, stacks and exit codes; knows nothing about
# servers.


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LastResort:
    """A listener to SIGINT and SIGTERM beside the event loop, however busy that is.

    Python's handlers run on the main thread, and asyncio's on the loop. What C writes to the wakeup
    descriptor at a signal is there at once: a thread reads it here, and passes it on to the loop.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        """`on_signal` is called on a thread of ours with how many ending signals have come. To be
        made on the main thread, after the loop's handlers were set.
        """
        self._on_signal, self._num_signals = on_signal, 0
        self._deadline: float | None = None
        self._exit_code, self._why = 0, ""  # without a reason: the end is as it should be
        self._lock = threading.Lock()
        self._main_thread = threading.get_ident()
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        loops = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._loops = -1 if loops < 0 else os.dup(loops)  # stays what it is if the loop is closed
        threading.Thread(target=self._run, name="aioserve-last-resort", daemon=True).start()

    def end_within(self, seconds: float, exit_code: int, why: str = "") -> None:
        """End the process after `seconds` at the latest, with this exit code. Where a thread hangs,
        `why` says what, and is in the log with the stacks. Of several deadlines the earliest holds.
        From any thread.
        """
        with self._lock:
            deadline = time.monotonic() + seconds
            if self._deadline is not None and self._deadline <= deadline:
                return
            self._deadline, self._exit_code, self._why = deadline, exit_code, why
        with suppress(OSError):  # full: it looks anyway
            self._theirs.send(b"\0")

    def end(self, exit_code: int, why: str) -> None:
        """End the process now: no thread is waited for, and nothing is cleaned up."""
        log_within(
            *(LOG_SECONDS, logger.critical, "%s: the process ends now, exit code %d"),
            *(why, exit_code),
        )
        os._exit(exit_code)

    # What follows runs on the thread.

    def _run(self) -> None:
        while True:
            with self._lock:
                deadline = self._deadline
            seconds = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            ready, _, _ = select.select([self._ours], [], [], seconds)
            if ready:
                self._hear(self._ours.recv(4096))
            elif deadline is not None:
                if not self._why:
                    os._exit(self._exit_code)
                log_within(
                    *(LOG_SECONDS, logger.error, "the main thread is here:\n%s\n%s"),
                    *(told(frame_of(self._main_thread)), stacks_of_runners()),
                )
                self.end(self._exit_code, self._why)

    def _hear(self, numbers: bytes) -> None:
        for number in numbers.replace(b"\0", b""):
            if self._loops >= 0:
                with suppress(OSError):  # the loop is closed, or has more to read than it can
                    os.write(self._loops, bytes([number]))
            if number in ENDING_SIGNALS:
                self._num_signals += 1
                self._on_signal(self._num_signals)


# Tells the service manager that started this process how it is: `sd_notify` of systemd. Knows one
# socket and some words. Where no service manager listens, nothing is sent. The protocol:
# https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html


SOCKET_VARIABLE = "NOTIFY_SOCKET"
WATCHDOG_VARIABLE, WATCHDOG_PID_VARIABLE = "WATCHDOG_USEC", "WATCHDOG_PID"

TOLD_TIMES = 3  # how often in its time a service manager hears that the loop turns


def notify(*words: str) -> None:
    """Send words such as "READY=1" to the service manager, if one listens."""
    address = os.environ.get(SOCKET_VARIABLE, "")
    if not address:
        return
    if address.startswith("@"):  # an abstract socket begins with a zero byte
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)  # a service manager that does not read holds up no request
            sock.sendto("\n".join(words).encode(), address)
    except OSError as error:
        logger.warning("the service manager at %s does not listen: %s", address, error.strerror)


async def tell_that_the_loop_turns() -> None:
    """Tell the service manager so again and again until cancelled, if it watches this process:
    with `WatchdogSec=` systemd ends a service that has not said so for that long.
    """
    seconds = _watchdog_seconds()
    while seconds is not None:
        notify("WATCHDOG=1")
        await asyncio.sleep(seconds / TOLD_TIMES)


def _watchdog_seconds() -> float | None:
    """Return seconds after which the service manager ends this process if it says nothing."""
    watched = os.environ.get(WATCHDOG_PID_VARIABLE)
    microseconds = os.environ.get(WATCHDOG_VARIABLE, "")
    if watched not in (None, str(os.getpid())) or not microseconds.isdecimal():
        return None
    return int(microseconds) / 1e6 or None
