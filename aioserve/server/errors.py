"""Errors to status codes and wire structs, and back: one table for server and client.

Knows nothing about aiohttp. A message reaches the client as it is; a traceback never does.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import msgspec

from aioserve.errors import (
    AioserveError,
    EngineDeadError,
    EngineOverloadedError,
    EnginePausedError,
    EngineUnavailableError,
    ForbiddenError,
    GrammarLimitError,
    KeyLimitError,
    RequestAbortedError,
    RequestError,
    RequestFailedError,
    RequestIdInUseError,
    RequestRejectedError,
    RequestTimeoutError,
    TemplateStalledError,
    UnknownAdapterError,
    UnknownKeyError,
    UnknownModelError,
)
from aioserve.server.protocol import ErrorInfo, ErrorResponse
from aioserve.support.parts import brought, load

#: Seconds, as the field `timeout`.
TIMEOUT_HEADER = "X-Request-Timeout"


class UnknownFileError(RequestError):
    """Raised for a file that is not there, or not any more."""


class UnknownRequestError(RequestError):
    """No request of that id is running."""


class UnknownResponseError(RequestError):
    """No response of that id is stored."""


class UnknownBatchError(RequestError):
    """No batch of that id is kept, or the server keeps none."""


class ForeignHostError(ForbiddenError):
    """The request calls the server by a name that is not its own."""


class ForeignOriginError(ForbiddenError):
    """A browser sends the request for a page of an origin that may not ask."""


class FarLookerError(ForbiddenError):
    """The server shows its work to this machine alone."""


class BodyTimeoutError(RequestError):
    """The body of a request has not come in the time that it may take."""


class BodiesFullError(EngineOverloadedError):
    """The server holds as many bytes of unfinished bodies as it may."""


class UnknownFieldError(RequestError):
    """The body has a field of a name that this server does not know."""


class _Kind(NamedTuple):
    error: type[AioserveError]
    status: int
    type: str
    code: str | None


# The first row that fits wins, so subclasses stand before their bases. Of each status, the row that
# says least stands last: an error without a code is read as that one.
_KINDS = (
    _Kind(UnknownModelError, 404, "invalid_request_error", "model_not_found"),
    _Kind(UnknownAdapterError, 404, "invalid_request_error", "adapter_not_found"),
    _Kind(UnknownFileError, 404, "invalid_request_error", "file_not_found"),
    _Kind(UnknownRequestError, 404, "invalid_request_error", "request_not_found"),
    _Kind(UnknownResponseError, 404, "invalid_request_error", "response_not_found"),
    _Kind(UnknownBatchError, 404, "invalid_request_error", "batch_not_found"),
    _Kind(UnknownFieldError, 400, "invalid_request_error", "unknown_parameter"),
    _Kind(BodyTimeoutError, 408, "invalid_request_error", "body_timeout"),
    _Kind(RequestIdInUseError, 409, "invalid_request_error", "request_id_in_use"),
    _Kind(UnknownKeyError, 401, "invalid_request_error", "invalid_api_key"),
    _Kind(ForeignHostError, 403, "permission_error", "host_not_allowed"),
    _Kind(ForeignOriginError, 403, "permission_error", "origin_not_allowed"),
    _Kind(FarLookerError, 403, "permission_error", "loopback_only"),
    _Kind(ForbiddenError, 403, "permission_error", "not_allowed"),
    _Kind(RequestAbortedError, 400, "invalid_request_error", "request_aborted"),
    _Kind(GrammarLimitError, 400, "invalid_request_error", "grammar_limit"),
    _Kind(RequestError, 400, "invalid_request_error", None),
    _Kind(BodiesFullError, 503, "server_error", "too_many_bodies"),
    _Kind(TemplateStalledError, 503, "server_error", "template_stalled"),
    _Kind(EnginePausedError, 503, "server_error", "engine_paused"),
    _Kind(KeyLimitError, 429, "rate_limit_error", "rate_limit_exceeded"),
    _Kind(RequestRejectedError, 429, "rate_limit_error", "request_rejected"),
    _Kind(EngineOverloadedError, 429, "rate_limit_error", "engine_overloaded"),
    _Kind(RequestTimeoutError, 408, "invalid_request_error", "request_timeout"),
    _Kind(RequestFailedError, 500, "server_error", "request_failed"),
    _Kind(EngineDeadError, 503, "server_error", "engine_unavailable"),
)
_INTERNAL = _Kind(AioserveError, 500, "server_error", "internal_error")


def to_wire(error: BaseException) -> tuple[int, ErrorResponse]:
    """Status and body for `error`; an error not raised on purpose is not described."""
    kind = next((k for k in _KINDS if isinstance(error, k.error)), _INTERNAL)
    message = str(error) if isinstance(error, AioserveError) else "internal server error"
    param = error.param if isinstance(error, RequestError) else None
    return kind.status, ErrorResponse(
        error=ErrorInfo(message=message, type=kind.type, param=param, code=kind.code)
    )


def status_of(error: type[AioserveError], path: str) -> int:
    """Return the HTTP status of all errors of that class, on that path."""
    kind = next(kind for kind in _KINDS if issubclass(error, kind.error))
    style = style_of(path)
    return kind.status if style is None else style.status(kind.status, kind.code)


class ApiStyle(NamedTuple):
    """The style of an API that is not OpenAI's: the errors and headers that its clients expect on
    its paths.
    """

    error: type[msgspec.Struct]  # the body of an error
    status: Callable[[int, str | None], int]  # from OpenAI's status and code
    to_error: Callable[[int, ErrorInfo], tuple[int, msgspec.Struct]]  # from OpenAI's status, body
    key_header: str = ""  # of a request: its key, where it is not in Authorization
    id_header: str = ""  # of an answer: its id, besides X-Request-Id


@cache
def styled() -> tuple[str, ...]:
    """Return the beginnings of the paths of APIs that parts bring, each of which has a style."""
    return tuple(brought("styles"))


def styles() -> list[ApiStyle]:
    """Return the styles of all APIs that parts bring."""
    return [_style(prefix) for prefix in styled()]


def style_of(path: str) -> ApiStyle | None:
    """Return the style of the API that a path belongs to; None where it is OpenAI's."""
    prefix = next((prefix for prefix in styled() if path.startswith(prefix)), None)
    return None if prefix is None else _style(prefix)


@cache
def _style(prefix: str) -> ApiStyle:
    style: ApiStyle = load("styles", prefix)
    return style


def from_wire(status: int, info: ErrorInfo, retry_after: float = 1.0) -> AioserveError:
    """Return the exception for an error that a server sent, in a response or as an event (500)."""
    kind = next((k for k in _KINDS if k.code is not None and k.code == info.code), None)
    if kind is None:
        # The last row of a status is the one that says least.
        kind = next((k for k in reversed(_KINDS) if k.status == status), None)
    error = kind.error if kind is not None else RequestFailedError
    if issubclass(error, RequestError) or (kind is None and status < 500):
        cls = error if issubclass(error, RequestError) else RequestError
        return cls(info.message, param=info.param)
    if issubclass(error, EngineOverloadedError):
        return error(info.message, retry_after=retry_after)
    if error is EngineDeadError and status == 503:  # else it died in the middle of a stream
        return EngineUnavailableError(info.message, retry_after)
    return error(info.message)
