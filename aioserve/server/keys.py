"""The keys of what the application and its requests share, and what a client's id may look like."""

import uuid

from aiohttp import web

from aioserve.engine import EngineClient
from aioserve.errors import RequestError
from aioserve.server.access.access import Access
from aioserve.server.access.hosts import Hosts
from aioserve.server.access.keyring import Key
from aioserve.server.formats.chat_format import ChatFormat
from aioserve.server.http_counts import HttpCounts
from aioserve.server.images import ImageLoader
from aioserve.server.logprobs import TokenTexts
from aioserve.server.responses.store import Responses
from aioserve.server.running import RunningResponses

ENGINE = web.AppKey("ENGINE", EngineClient)
IMAGES = web.AppKey("IMAGES", ImageLoader)
RESPONSES = web.AppKey("RESPONSES", Responses)
RUNNING = web.AppKey("RUNNING", RunningResponses)
TOKEN_TEXTS = web.AppKey("TOKEN_TEXTS", TokenTexts)
CHAT_FORMAT = web.AppKey("CHAT_FORMAT", ChatFormat)
ACCESS = web.AppKey("ACCESS", Access)
HOSTS = web.AppKey("HOSTS", Hosts)
NEEDS = web.AppKey("NEEDS", dict[str, str])  # by route: which key it needs, as `Route.needs` says
KEY = web.RequestKey("KEY", Key)  # on a request: its key, where keys are required
HTTP_COUNTS = web.AppKey("HTTP_COUNTS", HttpCounts)
RESPONSE_ID = web.RequestKey("RESPONSE_ID", str)  # on a request: the id of its answer

MADE_ID = web.RequestKey("MADE_ID", str)  # on one that has no such answer: made for it

MAX_ID_LENGTH = 128


def make_id() -> str:
    """For what is refused before it has an id of its own."""
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
