"""What an application and its requests share: their ids and keys, and responses that are made.

The id of a response can abort all its requests.
"""

import contextlib
import uuid
from asyncio import Event
from collections.abc import Iterator, Sequence

from aiohttp import web

from aioserve.engine import EngineClient
from aioserve.errors import RequestError, RequestIdInUseError
from aioserve.server.access.keys import Key

MAX_ID_LENGTH = 128


def make_id() -> str:
    """A new id for a request that is refused before it has one of its own."""
    return f"req-{uuid.uuid4().hex}"


def is_sane_id(given: str) -> bool:
    """Whether an id can stand in a header and in a line of a log."""
    return given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID_LENGTH


def check_id(given: str) -> None:
    """Raises `RequestError` for an id that a client may not choose."""
    if not is_sane_id(given):
        raise RequestError(
            f"request_id must be 1 to {MAX_ID_LENGTH} printable ASCII characters",
            param="request_id",
        )


class RunningResponses:
    """The responses of one application that are not over."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._running: dict[str, tuple[Event, Sequence[str]]] = {}
        self._owners: dict[str, str] = {}  # by every id of theirs

    @contextlib.contextmanager
    def enter(
        self, response_id: str, request_ids: Sequence[str], owner: str = ""
    ) -> Iterator[Event]:
        """Inside the block the response can be aborted by its owner. Yields what is set then:
        requests that were not yet handed over are the caller's to abort. Raises
        `RequestIdInUseError`.
        """
        own_ids = {response_id, *request_ids}
        if taken := own_ids & self._owners.keys():  # else an abort of one would end the other
            raise RequestIdInUseError(f"request id {min(taken)!r} is in use")
        is_aborted = Event()
        self._running[response_id] = (is_aborted, request_ids)
        self._owners.update(dict.fromkeys(own_ids, owner))
        try:
            yield is_aborted
        finally:
            del self._running[response_id]
            for own_id in own_ids:
                del self._owners[own_id]

    def abort(self, given_id: str, reach: str = "") -> bool:
        """End a response, or one request, early. False if none of that id is running, or it is not
        of the owner `reach`; "" matches every owner.
        """
        if reach and self._owners.get(given_id) != reach:
            return False
        if given_id not in self._running:
            return self._engine.abort(given_id)
        is_aborted, request_ids = self._running[given_id]
        is_aborted.set()
        for request_id in request_ids:
            self._engine.abort(request_id)
        return True


ENGINE = web.AppKey("ENGINE", EngineClient)
RUNNING = web.AppKey("RUNNING", RunningResponses)
NEEDS = web.AppKey("NEEDS", dict[str, str])  # by route: which key it needs, as `Route.needs` says
KEY = web.RequestKey("KEY", Key)  # on a request: its key, where keys are required
RESPONSE_ID = web.RequestKey("RESPONSE_ID", str)  # on a request: the id of its answer

MADE_ID = web.RequestKey("MADE_ID", str)  # on one that has no such answer: made for it
OWN_HINTS = web.RequestKey("OWN_HINTS", dict[str, bool])  # on one of the server's own: its hints
CHAIN = web.RequestKey("CHAIN", str)  # on one that goes on with a response: the id of the first one
