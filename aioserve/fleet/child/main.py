"""The engine's process: a server on a Unix socket, for the program that started it.

Ends when that program wants it to, and with it, however that ends: stdin is a pipe whose other end
closes then. Knows the server. Takes settings from the pipe and no arguments.
"""

import logging
import os
import signal
import sys
import threading
from contextlib import suppress

from aioserve.errors import AioserveError, ConfigError, EngineDeadError
from aioserve.fleet.child.engine_process import receive
from aioserve.support.arguments import EXIT_ENGINE_DEAD, EXIT_FAILED, EXIT_USAGE, run
from aioserve.support.logs import set_up_logging
from aioserve.support.process import end_at_sigterm, ignore_sigterm, prepare_process


def main() -> int:
    """Serve until the program ends or SIGTERM comes. Returns the exit code, that of `serve`."""
    prepare_process()
    end_at_sigterm()
    try:
        # Unbuffered: what comes after the orders is for the thread that waits for the end.
        orders = receive(os.fdopen(os.dup(0), "rb", buffering=0))
    except EOFError:
        return EXIT_FAILED
    threading.Thread(target=_end_with_program, name="aioserve-lifeline", daemon=True).start()
    config = orders.config
    set_up_logging(config.server.log_level, "json")  # the program logs them as its own
    # That it was interrupted is no news to the program, which has ended it.
    logging.getLogger("aioserve.server.process").setLevel(logging.ERROR)
    try:
        from aioserve.server.app import serve

        try:
            run(serve(config))
        finally:
            ignore_sigterm()
    except AioserveError as error:
        print(f"aioserve: error: {error}", file=sys.stderr)  # noqa: T201
        if isinstance(error, ConfigError):
            return EXIT_USAGE
        return EXIT_ENGINE_DEAD if isinstance(error, EngineDeadError) else EXIT_FAILED
    finally:
        if orders.own_folder is not None:
            with suppress(OSError):
                os.rmdir(orders.own_folder)
    return 0


def _end_with_program() -> None:
    while os.read(0, 4096):  # it writes no more: this returns when the other end is closed
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # again and again would not let it drain


if __name__ == "__main__":
    sys.exit(main())
