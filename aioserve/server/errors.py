"""Errors to status codes and wire structs, and back: one table for server and client.

Knows nothing about aiohttp. A message reaches the client as it is; a traceback never does.
"""

from typing import NamedTuple

import msgspec

from aioserve.errors import (
    AioserveError,
    EngineDeadError,
    EngineOverloadedError,
    EnginePausedError,
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
from aioserve.server.anthropic.protocol import ErrorDetail, MessagesError
from aioserve.server.protocol import ErrorInfo, ErrorResponse

#: Seconds, as the field `timeout`.
TIMEOUT_HEADER = "X-Request-Timeout"


class UnknownFileError(RequestError):
    """There is no such file, or none any more."""


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
    """The HTTP status of all errors of that class, on that path."""
    kind = next(kind for kind in _KINDS if issubclass(error, kind.error))
    return _anthropic_status(kind.status, kind.code) if is_for_anthropic(path) else kind.status


def is_for_anthropic(path: str) -> bool:
    """Whether a client of Anthropic's reads what is answered there, and knows its errors."""
    return path.startswith("/v1/messages")


_OVERLOADED = 529  # Anthropic's, where the limit is the server's and not the client's
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    _OVERLOADED: "overloaded_error",
}


def to_messages_error(status: int, info: ErrorInfo) -> tuple[int, MessagesError]:
    """The same in Anthropic's words: a full queue is its 529, and the message names the field."""
    status = _anthropic_status(status, info.code)
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    names_field = info.param is None or info.param in info.message
    message = info.message if names_field else f"{info.param}: {info.message}"
    # Anthropic's tool runner goes on without a thread where it reads this.
    is_thread = info.param == "thread"
    details = {"error_code": "thread_unsupported_request"} if is_thread else msgspec.UNSET
    return status, MessagesError(error=ErrorDetail(type=kind, message=message, details=details))


def _anthropic_status(status: int, code: str | None) -> int:
    return _OVERLOADED if (status, code) == (429, "engine_overloaded") else status


def from_wire(status: int, info: ErrorInfo, retry_after: float = 1.0) -> AioserveError:
    """The exception for an error that a server sent, in a response or as an event (500)."""
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
    return error(info.message)
