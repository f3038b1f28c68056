"""The result of a simulated step, which is there at a time of the event loop's clock.

Knows the loop; knows nothing about steps.
"""

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from aioserve.outputs import ModelRunnerOutput

Jump = Callable[[float], bool]


class StepFuture(asyncio.Future[ModelRunnerOutput]):
    """Done at a time of the loop's clock. A task that waits for it alone on a virtual clock does
    not go through the loop: the clock jumps.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, when: float, output: ModelRunnerOutput, jump_to: Jump
    ) -> None:
        super().__init__(loop=loop)
        self._when = when
        self._output = output
        self._jump_to = jump_to
        self._has_timer = False

    def __await__(self) -> Generator[Any, None, ModelRunnerOutput]:
        if not self._has_timer and not self.done() and self._jump_to(self._when):
            self.set_result(self._output)
        return super().__await__()

    def add_done_callback(self, fn: Callable[[Any], object], *, context: Any = None) -> None:
        """Add a callback; the future then completes through the event loop."""
        if not self._has_timer and not self.done():
            self._has_timer = True
            self.get_loop().call_at(self._when, self._finish)
        super().add_done_callback(fn, context=context)

    def _finish(self) -> None:
        if not self.done():  # it was cancelled at shutdown
            self.set_result(self._output)
