"""What an application and its requests share: their ids and keys, and responses.

The id of a response that is being made can abort all its requests; finished ones may be kept.
"""

import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from aiohttp import web

from aioserve.engine import EngineClient
from aioserve.engine.chat.chat_format import ChatFormat
from aioserve.errors import RequestError, RequestIdInUseError
from aioserve.server.access.keys import Key
from aioserve.support.tokens import TokenTexts

MAX_ID_LENGTH = 128


def make_id() -> str:
    """Return a new id for a request that is refused before it has one of its own."""
    return f"req-{uuid.uuid4().hex}"


def is_sane_id(given: str) -> bool:
    """Return whether an id can stand in a header and in a line of a log."""
    return given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID_LENGTH


def check_id(given: str) -> None:
    """Raises `RequestError` for an id that a client may not choose."""
    if not is_sane_id(given):
        raise RequestError(
            f"request_id must be 1 to {MAX_ID_LENGTH} printable ASCII characters",
            param="request_id",
        )


class RunningResponse:
    """A response that is not over; as a context manager it is one inside its block."""

    def __init__(
        self, running: "RunningResponses", response_id: str, request_ids: Sequence[str], owner: str
    ) -> None:
        self._all, self.owner = running, owner
        self.response_id, self.request_ids = response_id, request_ids
        self.own_ids = {response_id, *request_ids}
        self.is_aborted = False

    def __enter__(self) -> "RunningResponse":
        self._all.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._all.discard(self)


class RunningResponses:
    """The responses of one application that are not over."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._running: dict[str, RunningResponse] = {}
        self._owners: dict[str, str] = {}  # by every id of theirs

    def enter(
        self, response_id: str, request_ids: Sequence[str], owner: str = ""
    ) -> RunningResponse:
        """Inside the block the response can be aborted by its owner. The block gets the response,
        whose `is_aborted` tells it: requests that were not yet handed over are then the caller's to
        abort. Entering the block raises `RequestIdInUseError`.
        """
        return RunningResponse(self, response_id, request_ids, owner)

    def add(self, response: RunningResponse) -> None:
        """Take the ids of a response, which can be aborted from now on. Raises
        `RequestIdInUseError` if another one has one of them.
        """
        taken = response.own_ids & self._owners.keys()
        if taken:  # else an abort of one would end the other
            raise RequestIdInUseError(f"request id {min(taken)!r} is in use")
        self._running[response.response_id] = response
        for own_id in response.own_ids:
            self._owners[own_id] = response.owner

    def discard(self, response: RunningResponse) -> None:
        """Give the ids of a response back."""
        del self._running[response.response_id]
        for own_id in response.own_ids:
            del self._owners[own_id]

    def abort(self, given_id: str, reach: str = "") -> bool:
        """End a response, or one request, early. False if none of that id is running, or it is not
        of the owner `reach`; "" matches every owner.
        """
        if reach and self._owners.get(given_id) != reach:
            return False
        if given_id not in self._running:
            return self._engine.abort_now(given_id)
        response = self._running[given_id]
        response.is_aborted = True
        for request_id in response.request_ids:
            self._engine.abort_now(request_id)
        return True


ENGINE = web.AppKey("ENGINE", EngineClient)
TOKEN_TEXTS = web.AppKey("TOKEN_TEXTS", TokenTexts)  # of the engine's tokenizer
RUNNING = web.AppKey("RUNNING", RunningResponses)
NEEDS = web.AppKey("NEEDS", dict[str, str])  # by route: which key it needs, as `Route.needs` says
KEY = web.RequestKey("KEY", Key)  # on a request: its key, where keys are required
CHAT_FORMAT = web.AppKey("CHAT_FORMAT", ChatFormat)
RESPONSE_ID = web.RequestKey("RESPONSE_ID", str)  # on a request: the id of its answer

MADE_ID = web.RequestKey("MADE_ID", str)  # on one that has no such answer: made for it
OWN_HINTS = web.RequestKey("OWN_HINTS", dict[str, bool])  # on one of the server's own: its hints
CHAIN = web.RequestKey("CHAIN", str)  # on one that goes on with a response: the id of the first one


# Responses that can be asked for again and gone on with, the newest ones. Bounded by number and by
# bytes. Knows nothing about what they say.


MAX_RESPONSES = 10_000
MAX_BYTES = 2**26  # of all of them; each is whole, whatever it shares with others


class Kept(NamedTuple):
    """A response, and what led to it: both as JSON."""

    items: bytes  # all input items up to the response, without instructions
    response: bytes
    owner: str = ""  # the name of the key that it was asked for with
    chain: str = ""  # the id of the response that its conversation began with

    def is_for(self, reach: str) -> bool:
        """Return whether a client with the key named `reach` may see it; "" may see all."""
        return reach in ("", self.owner)


class Responses(Protocol):
    """A store of responses, wherever it is."""

    async def get(self, response_id: str) -> Kept | None:
        """Return a stored response; None if it was never stored or is forgotten."""

    async def put(self, response_id: str, kept: Kept) -> None:
        """Keep it; those that were not asked for the longest are forgotten for it."""

    async def forget(self, response_id: str) -> bool:
        """Delete the response of that id; False if it is not stored."""


RESPONSES = web.AppKey("RESPONSES", Responses)
#: Makes the OpenAPI document of the application, as JSON.
DOCUMENT: web.AppKey[Callable[[], bytes]] = web.AppKey("DOCUMENT")


class ResponseStore:
    """Stored responses, in memory, by their ids."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._num_bytes = 0

    async def get(self, response_id: str) -> Kept | None:
        """Return a stored response; None if it was never stored or is forgotten."""
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
