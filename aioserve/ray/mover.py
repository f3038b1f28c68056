"""Requests of one ingress that may move, and the router that is asked which of them are to.

Costs nothing where the router moves none. Knows calls; does not know how they travel.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from aioserve.ray.call import Call
from aioserve.ray.chooser import Chooser, OwnChooser
from aioserve.ray.fleet import Fleet
from aioserve.ray.moving_call import MovingCall, may_move
from aioserve.request import RequestSpec
from aioserve.routing import Dispatcher, RouterError

logger = logging.getLogger(__name__)


class Mover:
    """One for each front end that has started."""

    def __init__(self, dispatcher: Dispatcher | None, max_model_len: int) -> None:
        """`dispatcher` asks the router; None: a router of Ray's, which moves nothing."""
        self._dispatcher = dispatcher
        self._moves = dispatcher is not None and dispatcher.kind.moves()
        self._max_model_len = max_model_len
        self._asking: asyncio.Task[None] | None = None
        self._last_error = ""

    def make_call(self, chooser: Chooser, spec: RequestSpec, *arguments: Any) -> Call:
        """The call of a request; `arguments` are those of `Call`, behind the chooser."""
        if self._moves and isinstance(chooser, OwnChooser) and may_move(spec):
            return MovingCall(chooser, self._max_model_len, *arguments)
        return Call(chooser, *arguments)

    def start(self, fleet: Fleet, calls: Mapping[str, Call]) -> None:
        """Ask the router from now on, if it migrates; `calls` are those that live, by id."""
        dispatcher = self._dispatcher
        if dispatcher is not None and (seconds := dispatcher.kind.rebalance_seconds) is not None:
            self._asking = asyncio.create_task(self._ask(dispatcher, seconds, fleet, calls))

    def close(self) -> None:
        """Ask the router no more which requests are to move. Idempotent."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(
        self, dispatcher: Dispatcher, seconds: float, fleet: Fleet, calls: Mapping[str, Call]
    ) -> None:
        while True:
            await asyncio.sleep(seconds)
            if fleet.lines:
                self._rebalance(dispatcher, calls)

    def _rebalance(self, dispatcher: Dispatcher, calls: Mapping[str, Call]) -> None:
        try:
            answers = dispatcher.rebalance()
        except RouterError as error:
            if str(error) != self._last_error:
                logger.error("%s; no request is moved", error)
                self._last_error = str(error)
            return
        for answer in answers:
            call = calls.get(answer.request_id)
            if isinstance(call, MovingCall):
                call.move(answer.to.name)
