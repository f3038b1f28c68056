"""Around every handler: errors in the shape of its routes, one log line, counts, X-Request-Id.

Knows nothing about what the handlers do.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from aioserve.engine.operations.command import Counted
from aioserve.errors import (
    AioserveError,
    EngineOverloadedError,
    RequestError,
    UnknownKeyError,
    is_panic,
)
from aioserve.server.access.access import ACCESS
from aioserve.server.access.connections import Connection
from aioserve.server.errors import style_of, styled, to_wire
from aioserve.server.protocol import ErrorInfo, ErrorResponse
from aioserve.server.running import KEY, MADE_ID, RESPONSE_ID, is_sane_id, make_id

logger = logging.getLogger(__name__)

LEFT = "499"  # the client has gone before there was an answer: what nginx calls it
OTHER = "other"  # no route of ours, or no method of HTTP

REQUEST_ID_HEADER = "X-Request-Id"

# What a 503 says if it knows no better. A guess: a server loads or drains for seconds or minutes,
# and a balancer has another one at once; /ready says when it is over.
RETRY_SECONDS = 5

#: Set on a request once the headers of its answer have left, or are about to.
HAS_BEGUN = web.RequestKey("has_begun", bool)

_encoder = msgspec.json.Encoder()


class HttpCounts:
    """Counts of HTTP responses of one application, since the process began."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, str]] = Counter()
        #: What else the application counts: each is asked on a scrape.
        self.more: list[Callable[[], list[Counted]]] = []

    def add(self, request: web.Request, status: str) -> None:
        """Count one response with this status."""
        resource = request.match_info.route.resource
        route = OTHER if resource is None else resource.canonical
        method = request.method if request.method in hdrs.METH_ALL else OTHER
        self._counts[method, route, status] += 1

    def tell(self) -> list[Counted]:
        """The counts with their labels, for metrics."""
        labels, told = ("method", "route", "status"), "HTTP requests that were answered"
        own = Counted("http_requests", told, labels, [*self._counts.items()])
        return [own, *(one for tell in self.more for one in tell())]


HTTP_COUNTS = web.AppKey("HTTP_COUNTS", HttpCounts)


@web.middleware
async def note_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return the answer, as the first middleware of all. The connection hears that its request is
    answered; a line tells what was refused or failed, as the engine logs what it served; and the
    answer is counted, a stream when it ends, with the status that it began with.
    """
    if isinstance(request.protocol, Connection):
        request.protocol.begin(request.content)
    counts, start = request.app[HTTP_COUNTS], time.perf_counter()
    try:
        response = await handler(request)
    except (asyncio.CancelledError, ConnectionError):
        _log(logging.DEBUG, request, "the client left", start)
        counts.add(request, LEFT)
        raise
    # A caller's own id is worth a line, because only this one ties it to the engine's.
    is_news = response.status >= 400 or _given_request_id(request) is not None
    _log(logging.INFO if is_news else logging.DEBUG, request, f"HTTP {response.status}", start)
    counts.add(request, str(response.status))
    return response


def _log(level: int, request: web.Request, outcome: str, start: float) -> None:
    if not logger.isEnabledFor(level):
        return
    logger.log(
        level,
        "%s %s (%s)%s: %s after %.0f ms",
        request.method,
        request.rel_url.raw_path,  # as it was sent: decoded, it could have lines of its own
        " is ".join(filter(None, (_given_request_id(request), _own_id(request)))),
        f" of key {request[KEY].name}" if KEY in request else "",
        outcome,
        (time.perf_counter() - start) * 1e3,
    )


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer with a JSON body that names the field for every error, never with a traceback."""
    try:
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
            raise web.HTTPUnsupportedMediaType(reason="compressed bodies are not supported")
        return await handler(request)
    except ConnectionError:
        raise  # the client has gone: it cannot be told
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if HAS_BEGUN in request:
            raise _cut_off(request, error) from error
        return _answer(request, error)


def _answer(request: web.Request, error: BaseException) -> web.Response:
    if isinstance(error, web.HTTPException):
        return _http_error(request, error)
    if isinstance(error, web.RequestPayloadError):
        error = RequestError(f"the body cannot be read: {error}")
    if not isinstance(error, AioserveError):
        path = request.rel_url.raw_path
        logger.error("%s %s (%s) failed", request.method, path, _own_id(request), exc_info=error)
    return _error(request, error)


def _cut_off(request: web.Request, error: BaseException) -> ConnectionError:
    """The answer has begun: another one would be read as a part of it. The connection ends without
    the answer's end, which clients notice.
    """
    logger.error(
        "%s %s (%s) failed in its answer, which is cut off",
        *(request.method, request.rel_url.raw_path, _own_id(request)),
        exc_info=error,
    )
    if request.transport is not None:
        request.transport.close()
    return ConnectionResetError("an answer was cut off")


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler, before headers leave: name the request in the caller's terms or ours."""
    request[HAS_BEGUN] = True
    request_id = _given_request_id(request) or _own_id(request)
    response.headers[REQUEST_ID_HEADER] = request_id
    path = request.path
    if path.startswith(styled()) and (style := style_of(path)) is not None and style.id_header:
        response.headers[style.id_header] = request_id


async def say_when_to_come_again(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler, before headers leave: no 503 is without `Retry-After`."""
    if response.status == 503:
        response.headers.setdefault(hdrs.RETRY_AFTER, str(RETRY_SECONDS))


def _given_request_id(request: web.Request) -> str | None:
    given = request.headers.get(REQUEST_ID_HEADER)
    return given if given is not None and is_sane_id(given) else None


def _own_id(request: web.Request) -> str:
    """Return what finds its line in the log: the id of its answer, or, without one, made for it."""
    own_id: str | None = request.get(RESPONSE_ID) or request.get(MADE_ID)
    if own_id is None:
        request[MADE_ID] = own_id = make_id()
    return own_id


def _error(request: web.Request, error: BaseException) -> web.Response:
    status, body = to_wire(error)
    headers: dict[str, str] = {}
    if isinstance(error, EngineOverloadedError):
        headers[hdrs.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after)))
    if isinstance(error, UnknownKeyError):
        headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
    return _json(request, status, body.error, headers)


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals: no such path, wrong method, body too large."""
    message = error.reason
    headers: dict[str, str] = {}
    if isinstance(error, web.HTTPNotFound):
        message = f"no such path: {request.path}"
    elif isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path} does not take {request.method}, only {allowed}"
        headers[hdrs.ALLOW] = allowed
    elif isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.client_max_size // 2**20
        message = f"the body is larger than {limit} MiB, the limit of this server"
    info = ErrorInfo(message=message, type="invalid_request_error")
    return _json(request, error.status, info, headers)


def _json(
    request: web.Request, status: int, info: ErrorInfo, headers: dict[str, str]
) -> web.Response:
    if not request.content.is_eof() and isinstance(request.protocol, Connection):
        request.protocol.refuse_body()
    if (access := request.app.get(ACCESS)) is not None:  # it is missing before the model is loaded
        key = request.get(KEY)
        access.refusals[info.code or f"http_{status}", "" if key is None else key.name] += 1
    body: msgspec.Struct = ErrorResponse(error=info)
    if (style := style_of(request.path)) is not None:
        status, body = style.to_error(status, info)
    return web.Response(
        body=_encoder.encode(body), status=status, headers=headers, content_type="application/json"
    )
