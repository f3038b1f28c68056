"""What this package logs in processes of Ray Serve: handed to Serve's own log, by a thread.

Serve writes its log where a line is logged, to a file or to a pipe. What it writes to may stand
still, and an event loop must not wait for it. Knows `logging`; knows no Ray.
"""

import contextlib
import logging
import logging.handlers
import queue
import threading
from collections.abc import Callable

from aioserve.support.logs import MAX_BYTES, also_waited_for, dropped_lines


def log_through_serve() -> None:
    """From now on what this package logs in this process is in the log of Ray Serve, at its level,
    handed over by a thread: the loop waits neither for a disk nor for a pipe. Idempotent.
    """
    ours, of_serve = logging.getLogger("aioserve"), logging.getLogger("ray.serve")
    if not any(isinstance(handler, HandedOver) for handler in ours.handlers):
        ours.addHandler(HandedOver(of_serve.handle))
        ours.setLevel(of_serve.getEffectiveLevel())
        ours.propagate = False


class HandedOver(logging.handlers.QueueHandler):
    """Passes records of the log on to `target` from a thread of its own, where another program's
    log is to have them: what that writes to may stand still. Records that do not fit the bounded
    queue are dropped and counted, and a record says so in their place.
    """

    def __init__(
        self, target: Callable[[logging.LogRecord], object], max_bytes: int = MAX_BYTES
    ) -> None:
        """`target` is called on the thread; an exception of it is passed over."""
        self._records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
        super().__init__(self._records)
        self._target = target
        self._max_bytes, self._num_bytes, self._num_untold = max_bytes, 0, 0
        self._changed = threading.Condition()  # on a lock that a signal handler may take again
        also_waited_for.append(self.wait_written)
        threading.Thread(target=self._run, name="aioserve-write-log", daemon=True).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue a record, or count it as dropped. Its text was made before, by `prepare`."""
        with self._changed:
            if self._num_untold or self._num_bytes + _size(record) > self._max_bytes:
                self._num_untold += 1
                dropped_lines["log"] += 1
                return
            self._put(record)

    def wait_written(self, seconds: float) -> bool:
        """Wait until `target` has taken all that is queued, `seconds` at most; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._num_bytes, seconds)

    def _put(self, record: logging.LogRecord) -> None:
        self._num_bytes += _size(record)
        self._records.put(record)

    def _run(self) -> None:
        while True:
            record = self._records.get()
            with contextlib.suppress(Exception):
                self._target(record)
            with self._changed:
                self._num_bytes -= _size(record)
                # Room for one record would only alternate with none.
                if self._num_untold and self._num_bytes <= self._max_bytes // 2:
                    told = f"{self._num_untold} lines of the log were dropped here"
                    self._num_untold = 0
                    self._put(logging.LogRecord(__name__, logging.WARNING, "", 0, told, None, None))
                self._changed.notify_all()


def _size(record: logging.LogRecord) -> int:
    return len(record.msg) + 500  # and what a record holds beside its text, about
