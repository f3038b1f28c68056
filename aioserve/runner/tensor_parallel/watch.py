"""The other ranks as a runner has them: what their end means to it.

Knows processes and an event loop; knows nothing about what ranks compute. Free of torch.
"""

import asyncio
import contextlib
from collections.abc import Callable

from aioserve.config import EngineConfig
from aioserve.errors import RunnerDeadError
from aioserve.runner.tensor_parallel.processes import OtherRanks


class RankWatch:
    """Of one runner, the first rank: it ends when one of the others does."""

    def __init__(self) -> None:
        self._others: OtherRanks | None = None
        self._death: RunnerDeadError | None = None
        self.on_death: Callable[[], None] = lambda: None

    def start(self, module: str, config: EngineConfig) -> None:
        """Run `module` for each. On the loop."""
        loop = asyncio.get_running_loop()

        def on_end(error: RunnerDeadError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear
                loop.call_soon_threadsafe(self._on_end, error)

        self._others = OtherRanks(module, config, on_end)

    @property
    def others(self) -> OtherRanks:
        """After `start`."""
        assert self._others is not None
        return self._others

    def check(self) -> None:
        """As `RunnerInterface.check`."""
        if self._death is not None:
            raise self._death

    async def close(self) -> None:
        """End all. Idempotent."""
        if self._others is not None:
            await asyncio.to_thread(self._others.close)

    def _on_end(self, error: RunnerDeadError) -> None:
        self._death = error
        self.on_death()
