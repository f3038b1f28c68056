"""A call that runs in pieces: on a thread of its own, and only while another thread waits for it.

So code of any kind can be stopped half-way, at places that call `pause`, and go on later. No two of
the threads ever run at the same time. Knows nothing about what is called.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _DroppedError(BaseException):
    """Ends the thread of a call that is not wanted any more."""


class PausedCall(Generic[T]):
    """To be ended by `finish` or by `drop`, as its thread waits until then."""

    def __init__(self, call: Callable[[], T]) -> None:
        """`call` has not begun yet. It may call `pause` of this object."""
        self._call = call
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._passed = 0.0  # of its work, at its last pause
        self._until: float | None = 0.0  # behind how much work it stops
        self._has_ended = self._is_dropped = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="aioserve-encoder", daemon=True)
        self._thread.start()

    def advance(self, work: float) -> None:
        """Let it run until it has come to a pause behind that much of its work, or has ended; not
        at all if it has come that far.
        """
        if not self._has_ended and self._passed < work:
            self._until = work
            self._resume()

    def finish(self) -> T:
        """Let it run to its end and return what it returns. Raises what it raises."""
        if not self._has_ended:
            self._until = None
            self._resume()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def drop(self) -> None:
        """End it where it is."""
        if not self._has_ended:
            self._is_dropped = True
            self._resume()
        self._thread.join()

    def pause(self, work: float = 1.0) -> None:
        """Called by the call itself, or by what it calls: a place to stop, behind `work` since the
        last one. On another thread it does nothing.
        """
        if threading.current_thread() is not self._thread:
            return
        self._passed += work
        if self._until is not None and self._passed >= self._until:
            self._back.release()
            self._wait()

    def _resume(self) -> None:
        self._go.release()
        self._back.acquire()

    def _wait(self) -> None:
        self._go.acquire()
        if self._is_dropped:
            raise _DroppedError

    def _run(self) -> None:
        try:
            self._wait()
            self._result = self._call()
        except BaseException as error:  # told to the caller of `finish`
            self._error = error
        finally:
            self._has_ended = True
            self._back.release()
