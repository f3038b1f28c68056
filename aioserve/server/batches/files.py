"""/v1/files: what batches read and leave, as OpenAI's API has it.

Knows the shape of these endpoints; where files are, `directory` knows.
"""

import os
import time
from typing import BinaryIO

import msgspec
from aiohttp import web

from aioserve.errors import RequestError
from aioserve.server.access.gate import owner_of, reach_of
from aioserve.server.batches.directory import DAY
from aioserve.server.batches.door import disk_of
from aioserve.server.batches.pages import page_of
from aioserve.server.batches.protocol import (
    FileDeleted,
    FileForm,
    FileList,
    FileObject,
    FilesPage,
)
from aioserve.server.batches.stored import StoredFile, make_id
from aioserve.server.batches.upload import receive
from aioserve.server.errors import UnknownBatchError, UnknownFileError
from aioserve.server.openapi import Route
from aioserve.server.protocol import RequestPart
from aioserve.server.validation import decode_query

PIECE = 2**18  # bytes that are read and sent at once
CONTENT_TYPE = "application/jsonl"

_encoder = msgspec.json.Encoder()


async def create_file(request: web.Request) -> web.Response:
    """The handler of POST. Raises `RequestError`, and `UnknownBatchError` where no file is kept."""
    disk = disk_of(request)
    upload = await receive(request, disk)
    try:
        now = int(time.time())
        seconds = upload.form.expires_after_seconds or int(disk.settings.batch_file_days * DAY)
        made = FileObject(
            id=make_id("file-"),
            bytes=upload.size,
            created_at=now,
            expires_at=now + seconds,
            filename=upload.filename,
            purpose=upload.form.purpose,
        )
        await disk.do(disk.add_file, StoredFile(owner=owner_of(request), file=made), upload.path)
    finally:
        await disk.do(upload.path.unlink, missing_ok=True)
    return _json(made)


async def list_files(request: web.Request) -> web.Response:
    """The handler of GET for all. Raises `RequestError` for a wrong query, and
    `UnknownBatchError` where no file is kept.
    """
    disk, page = disk_of(request), decode_query(request.query, FilesPage)
    stored = await disk.do(disk.list_files, reach_of(request))
    found = [s.file for s in stored if page.purpose in (None, s.file.purpose)]
    if page.order == "desc":
        found.reverse()
    data, first_id, last_id, has_more = page_of(found, page.after, page.limit)
    return _json(FileList(data=data, first_id=first_id, last_id=last_id, has_more=has_more))


async def get_file(request: web.Request) -> web.Response:
    """The handler of GET for one. Raises `UnknownFileError`, and `UnknownBatchError` where no file
    is kept.
    """
    return _json((await _find(request)).file)


async def get_file_content(request: web.Request) -> web.StreamResponse:
    """The handler of GET for its bytes. Raises as `get_file`."""
    disk, stored = disk_of(request), await _find(request)
    try:
        file: BinaryIO = await disk.do(open, disk.content(stored.file.id), "rb", buffering=0)
    except FileNotFoundError:
        raise _unknown(stored.file.id) from None
    try:
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        response.content_length = (await disk.do(os.fstat, file.fileno())).st_size
        await response.prepare(request)
        while piece := await disk.do(file.read, PIECE):
            await response.write(piece)
        await response.write_eof()
        return response
    finally:
        await disk.do(file.close)


async def delete_file(request: web.Request) -> web.Response:
    """The handler of DELETE. A batch that has begun with the file goes on. Raises as `get_file`."""
    disk, stored = disk_of(request), await _find(request)
    await disk.do(disk.remove_file, stored.file.id)
    return _json(FileDeleted(id=stored.file.id))


async def _find(request: web.Request) -> StoredFile:
    disk, file_id = disk_of(request), request.match_info["id"]
    decode_query(request.query, RequestPart)
    stored = await disk.do(disk.find_file, file_id, reach_of(request))
    if stored is None:
        raise _unknown(file_id)
    return stored


def _unknown(file_id: str) -> UnknownFileError:
    return UnknownFileError(f"no file {file_id[:64]!r} is kept here", param="id")


def _json(told: msgspec.Struct) -> web.Response:
    return web.Response(body=_encoder.encode(told), content_type="application/json")


_ERRORS = (RequestError, UnknownFileError, UnknownBatchError)

ROUTES = (
    Route(
        "POST",
        "/v1/files",
        create_file,
        "Keep a file for batches.",
        FileObject,
        form=FileForm,
        raises=(RequestError, UnknownBatchError),
    ),
    Route(
        "GET",
        "/v1/files",
        list_files,
        "The files that are kept.",
        FileList,
        query=FilesPage,
        raises=(RequestError, UnknownBatchError),
    ),
    Route(
        "GET",
        "/v1/files/{id}",
        get_file,
        "A file that is kept.",
        FileObject,
        query=RequestPart,
        raises=_ERRORS,
    ),
    Route(
        "GET",
        "/v1/files/{id}/content",
        get_file_content,
        "The bytes of a file.",
        str,
        query=RequestPart,
        raises=_ERRORS,
        media_types=(CONTENT_TYPE,),
    ),
    Route(
        "DELETE",
        "/v1/files/{id}",
        delete_file,
        "Forget a file.",
        FileDeleted,
        query=RequestPart,
        raises=_ERRORS,
    ),
)
