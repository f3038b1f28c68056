"""What signals mean to a server: events for its loop, and how long it may go on after each."""

import asyncio
import logging
import signal
from collections.abc import Callable

from aioserve.engine.watchdog import LOG_SECONDS, log_within
from aioserve.errors import AioserveError
from aioserve.server.last_resort import ENDING_SIGNALS, LastResort
from aioserve.support.arguments import EXIT_ENGINE_DEAD

logger = logging.getLogger(__name__)

# Seconds that the process may take to end after a signal while it loads; after the drain; after a
# second signal; after all is closed; and then where the engine has died. Longer than what each
# waits for by itself (handlers, workers, ranks, logs on a slow disk), shorter than the unit of
# systemd allows.
LOADING_SECONDS = 10.0
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
            self._say("interrupted: ends when this layer is loaded; again to end at once")
            last_resort.end_within(LOADING_SECONDS, 0, "the layer takes longer to load")
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
