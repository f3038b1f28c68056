"""The connections of a client to one server: HTTP, and errors from the wire struct of errors.

Knows when a request that the server refused may be sent again. Knows no route.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from typing import Any, TypeVar

import aiohttp
import msgspec

from aioserve.errors import (
    UNREADABLE,
    AioserveError,
    EngineDeadError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestFailedError,
    one_line,
)
from aioserve.server.errors import from_wire
from aioserve.server.protocol import ErrorInfo, ErrorResponse

T = TypeVar("T")

#: The longest pause before a request is sent again, in seconds: as long as a server of aioserve
#: ever asks for. A proxy may ask for hours.
MAX_RETRY_SECONDS = 60.0

_encoder = msgspec.json.Encoder()
error_decoder = msgspec.json.Decoder(ErrorResponse)


class Connection:
    """HTTP to the server at `base_url`. Its connections are opened by the first request."""

    def __init__(
        self,
        base_url: str,
        *,
        timeout: float | None = None,  # seconds without a byte, waiting in its queue included
        connect_timeout: float = 10.0,
        api_key: str | None = None,  # one of the server's, or of what stands before it
        headers: Mapping[str, str] | None = None,  # of every request
        retries: int = 0,  # how often a request that is refused for now is sent again
    ) -> None:
        self._retries = retries
        self._headers = dict(headers or {})
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.base_url = base_url.rstrip("/")
        self._socket_path = base_url[5:] if base_url.startswith("unix:") else None
        self._root = self.base_url if self._socket_path is None else "http://localhost"
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout, sock_read=timeout
        )
        self._open_session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close all connections; streams that are still read end with an error."""
        if self._open_session is not None:
            await self._open_session.close()

    def session(self) -> aiohttp.ClientSession:
        if self._open_session is None:
            self._open_session = aiohttp.ClientSession(
                timeout=self._timeout,
                headers=self._headers,
                connector=(  # without a limit: the server says when it is full
                    aiohttp.TCPConnector(limit=0)
                    if self._socket_path is None
                    else aiohttp.UnixConnector(self._socket_path, limit=0)
                ),
            )
        return self._open_session

    def decoded(self, decoder: Any, data: bytes, what: str = "the answer") -> Any:
        try:
            return decoder.decode(data)
        except UNREADABLE as error:
            message = f"{what} of {self.base_url} cannot be read: {one_line(error)}"
            raise RequestFailedError(message) from error

    @asynccontextmanager
    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        retries: int | None = None,
        **options: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful response; its connection is dropped if it was not read to the end.

        A request that the server refuses for now is sent again, `retries` times at most (default:
        those of the client), each after the time that the server asks for, `MAX_RETRY_SECONDS` at
        most. A request that the server may have begun with is not sent again.
        """
        if retries is None:
            retries = 0 if "data" in options else self._retries  # a file is read once
        while True:
            try:
                response = await self._sent(method, path, body, options)
                break
            except (EngineOverloadedError, EngineUnavailableError) as error:
                if retries == 0:
                    raise
                retries -= 1
                seconds = min(error.retry_after, MAX_RETRY_SECONDS)
            await asyncio.sleep(seconds)
        try:
            async with response:
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineDeadError(f"no answer from {self.base_url}: {one_line(error)}") from error

    async def _sent(
        self, method: str, path: str, body: bytes | None, options: dict[str, Any]
    ) -> aiohttp.ClientResponse:
        """Return the beginning of a successful response; raise the error of another one."""
        if body is not None:  # as a file: aiohttp sends large ones in pieces
            options = {"data": io.BytesIO(body), "headers": {"Content-Type": "application/json"}}
        try:
            response = await self.session().request(method, self._root + path, **options)
            if response.status == 200:
                return response
            async with response:
                refusal = _error_of(response, await response.read())
        except aiohttp.ClientConnectorError as error:
            words = f"no answer from {self.base_url}: {one_line(error)}"
            raise EngineUnavailableError(words) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineDeadError(f"no answer from {self.base_url}: {one_line(error)}") from error
        raise refusal

    async def told(self, told: type[T], path: str, body: msgspec.Struct) -> T:
        """Return the whole answer to a body that is posted to a route, as a struct."""
        return await self.asked(told, "POST", path, _encoder.encode(body))

    async def asked(
        self, told: type[T], method: str, path: str, body: bytes | None = None, **options: Any
    ) -> T:
        """Return the whole answer of a route, as a struct."""
        async with self.request(method, path, body, **options) as response:
            data = await response.read()
        decoded: T = self.decoded(msgspec.json.Decoder(told), data)
        return decoded


def _error_of(response: aiohttp.ClientResponse, body: bytes) -> AioserveError:
    try:
        info = error_decoder.decode(body).error
    except UNREADABLE:  # not aioserve: a proxy, or another server
        text = body[:200].decode("utf-8", "replace").strip()
        message = f"HTTP {response.status} from {response.url}: {text or response.reason}"
        info = ErrorInfo(message=message, type="http_error")
    try:
        retry_after = float(response.headers.get("Retry-After", "1"))
    except ValueError:  # a date: nothing of ours sends one
        retry_after = 1.0
    retry_after = retry_after if 0 <= retry_after < inf else 1.0
    return error_from_wire(response.status, info, response, retry_after)


def error_from_wire(
    status: int, info: ErrorInfo, response: aiohttp.ClientResponse, retry_after: float = 1.0
) -> AioserveError:
    """Return the error in one line, whether this server sent it or a proxy in front of it."""
    lines = info.message.splitlines() or ["no message"]
    one = msgspec.structs.replace(info, message=" ".join(lines))
    return with_id(from_wire(status, one, retry_after), response)


def with_id(error: AioserveError, response: aiohttp.ClientResponse) -> AioserveError:
    """Add the request id of the server's log to an error; tracebacks show it."""
    if (request_id := response.headers.get("X-Request-Id")) is not None:
        error.request_id = request_id
        error.add_note(f"request id: {request_id}")
    return error
