"""What fails in every step would fill the log: a line of each kind now and then.

Knows culprits by name, and nothing about what they did.
"""

import asyncio
import logging
import math
from collections.abc import Callable

logger = logging.getLogger(__name__)

#: What an observer, or what turns one request's tokens into text, may raise without harm to others.
FAULTS = (Exception, asyncio.CancelledError, SystemExit)

LOG_SECONDS = 1.0  # between two lines about the same culprit


class FailureLog:
    """Of one engine. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._throttles: dict[str, _Throttle] = {}

    def log(self, culprit: str, error: BaseException) -> None:
        """A line with a traceback, unless there was one about the same culprit just now."""
        throttle = self._throttles.setdefault(culprit, _Throttle())
        num_held = throttle.let_through(self._clock())
        if num_held is not None:
            since = f" ({num_held} more were not logged)" if num_held else ""
            logger.error("%s failed: %s%s", culprit, error, since, exc_info=error)

    def announce(self, message: str) -> None:
        """A line about what follows from failures."""
        logger.error("%s", message)


class _Throttle:
    """Lets something through once in `LOG_SECONDS`, and counts what it held back."""

    def __init__(self) -> None:
        self._last = -math.inf
        self._num_held = 0

    def let_through(self, now: float) -> int | None:
        """How many were held back since the last one; None: hold this one back, too."""
        if now - self._last < LOG_SECONDS:
            self._num_held += 1
            return None
        num_held, self._num_held, self._last = self._num_held, 0, now
        return num_held
