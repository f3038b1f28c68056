"""Hands what happened to the prefix index to an observer, between two steps.

Knows when it is safe to call a stranger's code, and what to do if that raises. Knows nothing about
blocks.
"""

import asyncio
from collections.abc import Callable

from aioserve.engine.step_loop import FAULTS, StepObserver
from aioserve.kv_cache import KVCacheManager, KVEvent


class KVEventRelay(StepObserver):
    """An observer that raises misses that event; the others get it."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        observer: Callable[[KVEvent], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Make a relay; `on_error` is called with what the observer raised."""
        self._kv_cache = kv_cache
        self._observer = observer
        self._on_error = on_error
        self._is_delivering = False

    def on_turn_end(self, now: float) -> None:
        self.deliver()

    def deliver(self) -> None:
        """Tell the observer what it does not know yet, in order. On the event loop."""
        if self._is_delivering:  # the observer itself caused more: it hears of that after the rest
            asyncio.get_running_loop().call_soon(self.deliver)
            return
        self._is_delivering = True
        try:
            for event in self._kv_cache.take_events():
                try:
                    self._observer(event)
                except FAULTS as error:
                    self._on_error(error)
        finally:
            self._is_delivering = False
