"""Takes the connections of a listening socket, each in a task of its own.

Knows sockets; its maker knows what becomes of a connection. It takes the place of asyncio's
own server where a connection must be known before its handshake, or where one that comes at the end
must not be lost: in Python 3.11 that forgets a connection which it accepts in the turn in which it
is closed, and the client waits for ever.
"""

import asyncio
import errno
from collections.abc import Callable, Coroutine
from socket import socket
from typing import Any

FULL_SECONDS = 1.0  # until connections are taken again, after there were too many


class Acceptor:
    """Of one socket, until it is stopped."""

    def __init__(
        self, sock: socket, enter: Callable[[socket], Coroutine[Any, Any, object]], backlog: int
    ) -> None:
        """`enter` has each connection, and what it raises is dropped; `backlog` are those
        that the system keeps while the loop is busy. Raises `OSError`.
        """
        self.socket = sock
        self._enter = enter
        self._loop = asyncio.get_running_loop()
        self._entering: set[asyncio.Task[Any]] = set()
        self._is_stopped = False
        sock.setblocking(False)
        sock.listen(backlog)
        self._listen()

    def stop(self) -> None:
        """Leave those that come to the queue. Idempotent."""
        if not self._is_stopped:
            self._is_stopped = True
            self._loop.remove_reader(self.socket.fileno())

    async def close(self, seconds: float) -> None:
        """Close the socket, and give up on those that have not entered within `seconds`."""
        self.stop()
        self.socket.close()
        if self._entering:
            _, late = await asyncio.wait(self._entering, timeout=seconds)
            for task in late:
                task.cancel()

    def _listen(self) -> None:
        if not self._is_stopped:
            self._loop.add_reader(self.socket.fileno(), self._accept)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError as error:  # no connection is left, or it has gone again
                if error.errno in (errno.EMFILE, errno.ENFILE):  # no descriptors: let some close
                    self._loop.remove_reader(self.socket.fileno())
                    self._loop.call_later(FULL_SECONDS, self._listen)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._enter(connection))
            self._entering.add(task)
            task.add_done_callback(self._entered)

    def _entered(self, task: asyncio.Task[Any]) -> None:
        self._entering.discard(task)
        if not task.cancelled():
            task.exception()
