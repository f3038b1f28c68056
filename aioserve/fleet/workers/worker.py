"""One worker process: an HTTP server in front of an engine in another process.

Ends when the engine wants it to, and with the engine. Knows sockets and exit codes; what it serves,
it learns from the engine.
"""

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from aioserve.engine.operations.command import count_dropped_lines
from aioserve.errors import AioserveError, ConfigError
from aioserve.fleet.workers.remote_engine import RemoteEngine, RemoteResponses
from aioserve.server.app import HANDLER_TIMEOUT, exempt_from_garbage_collection, listening
from aioserve.server.middleware import HttpCounts
from aioserve.server.running import RunningResponses
from aioserve.server.sockets import ListenSockets
from aioserve.support.arguments import EXIT_ENGINE_DEAD, EXIT_FAILED, EXIT_USAGE, run
from aioserve.support.logs import set_up_logging
from aioserve.support.process import prepare_process

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker; returns its exit code."""
    # A signal to all processes means the engine's: that drains, and then tells us to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    prepare_process()
    parser = argparse.ArgumentParser("aioserve.fleet.workers.worker")
    parser.add_argument("name", help="name of this worker in the log")
    parser.add_argument("address", help="address of the engine's socket")
    parser.add_argument("log_level", help="log level, as --log-level of serve")
    parser.add_argument("log_format", help="log format, as --log-format of serve")
    parser.add_argument(
        "lifeline", type=int, help="file descriptor that closes when the engine ends"
    )
    parser.add_argument(
        "num_admin", type=int, help="how many of the sockets, the last ones, serve the admin routes"
    )
    parser.add_argument(
        "sockets", type=int, nargs="+", help="file descriptors of the sockets to listen on"
    )
    given = parser.parse_args(argv)
    set_up_logging(given.log_level, given.log_format, given.name)
    sockets = [socket.socket(fileno=number) for number in given.sockets]
    num_public = len(sockets) - given.num_admin
    doors = ListenSockets(sockets[:num_public], sockets[num_public:])
    try:
        return run(_serve(given.address, given.lifeline, doors))
    except AioserveError as error:
        print(f"aioserve: error: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    finally:
        for sock in sockets:
            sock.close()


async def _serve(address: str, lifeline: int, doors: ListenSockets) -> int:
    engine = RemoteEngine(address)
    try:
        has_died = _watch(lifeline)
        ends: set[asyncio.Future[Any]] = {engine.is_over, has_died}

        async def prepare() -> None:
            await engine.start()
            exempt_from_garbage_collection()
            await engine.turn()

        starting = asyncio.create_task(prepare())
        await asyncio.wait({starting, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return engine.is_over.result() if engine.is_over.done() else EXIT_ENGINE_DEAD
        starting.result()
        running = RunningResponses(engine)
        engine.abort_here = running.abort
        responses, counts = RemoteResponses(engine), HttpCounts()
        counts.more.append(lambda: [count_dropped_lines()])
        engine.tell_counted = counts.tell
        async with listening(engine, doors, responses, running, engine.access, counts):
            engine.begin()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if engine.is_over.done():
                return engine.is_over.result()
            logger.critical("the engine's process has ended")
            engine.die("the engine has died: its process has ended")
            return EXIT_ENGINE_DEAD
    finally:
        engine.close()
        gc.unfreeze()


def _watch(lifeline: int) -> "asyncio.Future[None]":
    """Done when the engine's process has ended. Then this one does soon, even if its loop hangs."""
    loop = asyncio.get_running_loop()
    has_died: asyncio.Future[None] = loop.create_future()

    def settle() -> None:
        if not has_died.done():
            has_died.set_result(None)

    def wait() -> None:
        os.read(lifeline, 1)  # nothing is written: it returns when the other end is closed
        try:
            loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop has ended by itself
            return
        _end_late()

    threading.Thread(target=wait, name="aioserve-lifeline", daemon=True).start()
    return has_died


def _end_late() -> None:
    """End the process unless it has ended by itself; handlers have their time first."""
    threading.Event().wait(3 * HANDLER_TIMEOUT)
    os._exit(EXIT_ENGINE_DEAD)


if __name__ == "__main__":
    sys.exit(main())
