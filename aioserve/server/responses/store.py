"""Responses that can be asked for again and gone on with, the newest ones.

Bounded by number and by bytes. Knows nothing about what they say.
"""

from collections import OrderedDict
from typing import NamedTuple, Protocol

from aiohttp import web

MAX_RESPONSES = 10_000
MAX_BYTES = 2**26  # of all of them; each is whole, whatever it shares with others


class Kept(NamedTuple):
    """A response, and what led to it: both as JSON."""

    items: bytes  # all input items up to the response, without instructions
    response: bytes
    owner: str = ""  # the name of the key that it was asked for with
    chain: str = ""  # the id of the response that its conversation began with

    def is_for(self, reach: str) -> bool:
        """Whether a client with the key named `reach` may see it; "" may see all."""
        return reach in ("", self.owner)


class Responses(Protocol):
    """Where they are kept, wherever that is."""

    async def get(self, response_id: str) -> Kept | None:
        """None if it was never stored, or is forgotten."""

    async def put(self, response_id: str, kept: Kept) -> None:
        """Keep it; those that were not asked for the longest are forgotten for it."""

    async def forget(self, response_id: str) -> bool:
        """Delete the response of that id; False if it is not stored."""


RESPONSES = web.AppKey("RESPONSES", Responses)


class ResponseStore:
    """Stored responses, in memory, by their ids."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._num_bytes = 0

    async def get(self, response_id: str) -> Kept | None:
        """None if it was never stored, or is forgotten."""
        if response_id in self._kept:
            self._kept.move_to_end(response_id)
        return self._kept.get(response_id)

    async def put(self, response_id: str, kept: Kept) -> None:
        """Keep it; those that were not asked for the longest are forgotten for it."""
        self._kept[response_id] = kept
        self._num_bytes += sum(map(len, kept))
        while len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    async def forget(self, response_id: str) -> bool:
        """Delete the response of that id; False if it is not stored."""
        return self._forget(response_id)

    def _forget(self, response_id: str) -> bool:
        forgotten = self._kept.pop(response_id, ())
        self._num_bytes -= sum(map(len, forgotten))
        return bool(forgotten)
