"""Ends the process when its event loop or a thread would keep it for ever.

It is a thread of its own that hears signals and deadlines. Knows signals, stacks and exit codes;
knows nothing about servers.
"""

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from aioserve.engine.watchdog import (
    LOG_SECONDS,
    frame_of,
    log_within,
    stacks_of_runners,
    told,
)

logger = logging.getLogger(__name__)

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class LastResort:
    """Hears SIGINT and SIGTERM beside the event loop, however busy that is.

    Python's handlers run on the main thread, and asyncio's on the loop. What C writes to the wakeup
    descriptor at a signal is there at once: a thread reads it here, and passes it on to the loop.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        """`on_signal` is called on a thread of ours with how many ending signals have come. To be
        made on the main thread, after the loop's handlers were set.
        """
        self._on_signal, self._num_signals = on_signal, 0
        self._deadline: float | None = None
        self._exit_code, self._why = 0, ""
        self._lock = threading.Lock()
        self._main_thread = threading.get_ident()
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        loops = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._loops = -1 if loops < 0 else os.dup(loops)  # stays what it is if the loop is closed
        threading.Thread(target=self._run, name="aioserve-last-resort", daemon=True).start()

    def end_within(self, seconds: float, exit_code: int, why: str) -> None:
        """End the process after `seconds` at the latest, with this exit code, and with `why`
        in the log. Of several deadlines the earliest holds. From any thread.
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
