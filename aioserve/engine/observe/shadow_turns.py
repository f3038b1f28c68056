"""When a shadow has its turn: while a step computes, and while the engine is idle.

Knows the event loop. Knows nothing of what a shadow does with its time.
"""

import asyncio
from collections.abc import Callable

from aioserve.engine.observe.shadow import Shadow, ShadowFeed

# How often a shadow that is behind gets a slice of an engine that is idle. A guess.
TICK_SECONDS = 0.02


class ShadowTurns(ShadowFeed):
    """Feeds a shadow, and lets it advance: at the end of each turn of the live engine, and from a
    timer while it has work left.
    """

    def __init__(self, shadow: Shadow, clock: Callable[[], float]) -> None:
        """`clock` is the live scheduler's, in seconds."""
        super().__init__(shadow)
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    def on_turn_end(self, now: float) -> None:
        if self._is_closed:
            return
        self._shadow.advance(now)
        if self._timer is None and self._shadow.has_work:
            self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._on_timer)

    def close(self) -> None:
        """Stop the turns of the shadow policy."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self.on_turn_end(self._clock())
