"""Files and batches of a remote aioserve, by `client.files` and `client.batches`.

Speaks OpenAI's wire structs for both.
"""

import asyncio
import io
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Literal
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from aioserve.apis.batches.protocol import (
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
from aioserve.client.connection import Connection

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
        """Return one page of the files, the newest first, behind the file whose id is `after`."""
        page = FilesPage(after=after, limit=limit, order=order, purpose=purpose)
        return await self._connection.asked(FileList, "GET", _with_query("/v1/files", page))

    async def retrieve(self, file_id: str) -> FileObject:
        """Return what the server knows of a file."""
        return await self._connection.asked(FileObject, "GET", f"/v1/files/{_quoted(file_id)}")

    async def content(self, file_id: str) -> bytes:
        """Return all bytes of the file with that id."""
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
        """Return one page of the batches, the newest first, behind the batch whose id is
        `after`.
        """
        page = BatchesPage(after=after, limit=limit)
        return await self._connection.asked(BatchList, "GET", _with_query("/v1/batches", page))

    async def retrieve(self, batch_id: str) -> Batch:
        """Return a batch, and how far it is."""
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
