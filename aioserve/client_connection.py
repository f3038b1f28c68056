"""What an `AsyncClient` is made of: its connections to one server, and its files and batches.

Connections speak HTTP and raise errors from the wire struct of errors; files and batches speak the
wire structs of the server's routes, which are OpenAI's.
"""

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from aioserve.errors import UNREADABLE, AioserveError, EngineDeadError, RequestFailedError, one_line
from aioserve.server.batches.protocol import (
    Batch,
    BatchesPage,
    BatchList,
    BatchRequest,
    Endpoint,
    ExpiresAfter,
    FileDeleted,
    FileList,
    FileObject,
    FilesPage,
)
from aioserve.server.errors import from_wire
from aioserve.server.protocol import ErrorInfo, ErrorResponse

T = TypeVar("T")

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
    ) -> None:
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
        self, method: str, path: str, body: bytes | None = None, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful response; its connection is dropped if it was not read to the end."""
        if body is not None:  # as a file: aiohttp sends large ones in pieces
            options = {"data": io.BytesIO(body), "headers": {"Content-Type": "application/json"}}
        try:
            async with self.session().request(method, self._root + path, **options) as response:
                if response.status != 200:
                    raise _error_of(response, await response.read())
                yield response
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = one_line(error)
            raise EngineDeadError(f"no answer from {self.base_url}: {reason}") from error

    async def asked(
        self, told: type[T], method: str, path: str, body: bytes | None = None, **options: Any
    ) -> T:
        """The whole answer of a route, as a struct."""
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
    """The error in one line, whether this server sent it or a proxy in front of it."""
    lines = info.message.splitlines() or ["no message"]
    one = msgspec.structs.replace(info, message=" ".join(lines))
    return with_id(from_wire(status, one, retry_after), response)


def with_id(error: AioserveError, response: aiohttp.ClientResponse) -> AioserveError:
    """Add the request id of the server's log to an error; tracebacks show it."""
    if (request_id := response.headers.get("X-Request-Id")) is not None:
        error.request_id = request_id
        error.add_note(f"request id: {request_id}")
    return error


# Files and batches of a remote aioserve as async Python methods: `client.files`, `client.batches`.
# Speaks the wire structs of the server's routes, which are OpenAI's.


_encoder = msgspec.json.Encoder()


class ClientFiles:
    """Files that the server keeps for batches, by `client.files`. All methods raise
    `RequestError`, also for a file that the server does not have or a server without batches.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create(
        self,
        file: Path | bytes,
        *,
        filename: str | None = None,
        purpose: Literal["batch"] = "batch",
        expires_after_seconds: int | None = None,
    ) -> FileObject:
        """Upload a file, or its bytes: a request of a batch per line. It is deleted after
        `expires_after_seconds` (default: as the server says). Raises `OSError` for a file that
        cannot be read.
        """
        form = aiohttp.FormData()
        form.add_field("purpose", purpose)
        if expires_after_seconds is not None:
            form.add_field("expires_after[anchor]", "created_at")
            form.add_field("expires_after[seconds]", str(expires_after_seconds))
        opened: BinaryIO
        if isinstance(file, Path):
            name, opened = file.name, await asyncio.to_thread(file.open, "rb")
        else:
            name, opened = "lines.jsonl", io.BytesIO(file)
        try:
            form.add_field(
                "file", opened, filename=filename or name, content_type="application/jsonl"
            )
            return await self._connection.asked(FileObject, "POST", "/v1/files", data=form)
        finally:
            opened.close()

    async def list(
        self,
        *,
        after: str | None = None,
        limit: int = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> FileList:
        """One page of the files, the newest first, behind the file whose id is `after`."""
        page = FilesPage(after=after, limit=limit, order=order, purpose=purpose)
        return await self._connection.asked(FileList, "GET", _with_query("/v1/files", page))

    async def retrieve(self, file_id: str) -> FileObject:
        """What the server knows of a file."""
        return await self._connection.asked(FileObject, "GET", f"/v1/files/{_quoted(file_id)}")

    async def content(self, file_id: str) -> bytes:
        """All bytes of the file with that id."""
        path = f"/v1/files/{_quoted(file_id)}/content"
        async with self._connection.request("GET", path) as response:
            return await response.read()

    async def delete(self, file_id: str) -> FileDeleted:
        """Have the server forget a file; a batch that has begun with it goes on."""
        return await self._connection.asked(FileDeleted, "DELETE", f"/v1/files/{_quoted(file_id)}")


class ClientBatches:
    """Batches that the server runs, by `client.batches`. All methods raise `RequestError`, also
    for a batch that the server does not have or a server without batches.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def create(
        self,
        input_file_id: str,
        endpoint: Endpoint,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        output_expires_after_seconds: int | None = None,
    ) -> Batch:
        """Have the requests of a file run in the background on the route `endpoint`, until
        `completion_window` has passed: a number and s, m, h or d.
        """
        seconds = output_expires_after_seconds
        body = BatchRequest(
            input_file_id=input_file_id,
            endpoint=endpoint,
            completion_window=completion_window,
            metadata=None if metadata is None else dict(metadata),
            output_expires_after=(
                None if seconds is None else ExpiresAfter(anchor="created_at", seconds=seconds)
            ),
        )
        return await self._connection.asked(Batch, "POST", "/v1/batches", _encoder.encode(body))

    async def list(self, *, after: str | None = None, limit: int = 20) -> BatchList:
        """One page of the batches, the newest first, behind the batch whose id is `after`."""
        page = BatchesPage(after=after, limit=limit)
        return await self._connection.asked(BatchList, "GET", _with_query("/v1/batches", page))

    async def retrieve(self, batch_id: str) -> Batch:
        """A batch, and how far it is."""
        return await self._connection.asked(Batch, "GET", f"/v1/batches/{_quoted(batch_id)}")

    async def cancel(self, batch_id: str) -> Batch:
        """Have a batch end with the answers that it has."""
        return await self._connection.asked(
            Batch, "POST", f"/v1/batches/{_quoted(batch_id)}/cancel"
        )

    async def wait(self, batch_id: str, *, poll_seconds: float = 1.0) -> Batch:
        """The batch once it has ended, however it did: its `status` says that."""
        while True:
            batch = await self.retrieve(batch_id)
            if batch.has_ended:
                return batch
            await asyncio.sleep(poll_seconds)


def _quoted(given_id: str) -> str:
    return quote(given_id, safe="")


def _with_query(path: str, page: FilesPage | BatchesPage) -> str:
    given = msgspec.to_builtins(page)
    return f"{path}?{urlencode(given)}" if given else path
