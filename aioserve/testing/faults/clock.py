"""An event loop whose clock jumps ahead: as of a machine that was stopped, or that swaps.

Knows timers; knows nothing about what they are for.
"""

import asyncio


class JumpingLoop(asyncio.SelectorEventLoop):
    """Real time, and what `jump` adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead = 0.0

    def time(self) -> float:
        """In seconds, as of any loop."""
        return super().time() + self._ahead

    def jump(self, seconds: float) -> None:
        """Let `seconds` pass at once: all that was to happen in them is due."""
        self._ahead += seconds
