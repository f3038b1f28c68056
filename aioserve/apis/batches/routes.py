"""/v1/files and /v1/batches: files of requests, run in the background, as OpenAI's API has it.

The HTTP handlers: of files, then of batches. `disk` stores both; `runner` and `work` run batches.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import msgspec
from aiohttp import BodyPartReader, MultipartReader, hdrs, web
from aiohttp.http import HttpProcessingError

from aioserve.apis.batches.disk import (
    DAY,
    MIB,
    Disk,
    StoredBatch,
    StoredFile,
    check_room,
    disk_of,
    make_id,
    private,
)
from aioserve.apis.batches.protocol import (
    Batch,
    BatchesPage,
    BatchList,
    BatchRequest,
    FileDeleted,
    FileForm,
    FileList,
    FileObject,
    FilesPage,
)
from aioserve.errors import RequestError, one_line
from aioserve.server.access.gate import owner_of, reach_of
from aioserve.server.body import BodyDecoder, Route, decode_body, decode_query, json_response
from aioserve.server.errors import (
    BodyTimeoutError,
    UnknownBatchError,
    UnknownFieldError,
    UnknownFileError,
)
from aioserve.server.protocol import RequestPart
from aioserve.server.running import ENGINE

# Files.


READ_BYTES = 2**18  # bytes that are read and sent at once
CONTENT_TYPE = "application/jsonl"


async def create_file(request: web.Request) -> web.Response:
    """Answer POST. Raises `RequestError`, and `UnknownBatchError` where no file is kept."""
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
    return json_response(made)


async def list_files(request: web.Request) -> web.Response:
    """Answer GET for all. Raises `RequestError` for a wrong query, and `UnknownBatchError` where no
    file is kept.
    """
    disk, page = disk_of(request), decode_query(request.query, FilesPage)
    stored = await disk.do(disk.list_files, reach_of(request))
    found = [s.file for s in stored if page.purpose in (None, s.file.purpose)]
    if page.order == "desc":
        found.reverse()
    data, first_id, last_id, has_more = page_of(found, page.after, page.limit)
    return json_response(FileList(data=data, first_id=first_id, last_id=last_id, has_more=has_more))


async def get_file(request: web.Request) -> web.Response:
    """Answer GET for one. Raises `UnknownFileError`, and `UnknownBatchError` where no file
    is kept.
    """
    return json_response((await _find_file(request)).file)


async def get_file_content(request: web.Request) -> web.StreamResponse:
    """Answer GET for its bytes. Raises as `get_file`."""
    disk, stored = disk_of(request), await _find_file(request)
    try:
        file: BinaryIO = await disk.do(open, disk.content(stored.file.id), "rb", buffering=0)
    except FileNotFoundError:
        raise _unknown(stored.file.id) from None
    try:
        response = web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        response.content_length = (await disk.do(os.fstat, file.fileno())).st_size
        await response.prepare(request)
        while piece := await disk.do(file.read, READ_BYTES):
            await response.write(piece)
        await response.write_eof()
        return response
    finally:
        await disk.do(file.close)


async def delete_file(request: web.Request) -> web.Response:
    """Answer DELETE. A batch that has begun with the file goes on. Raises as `get_file`."""
    disk, stored = disk_of(request), await _find_file(request)
    await disk.do(disk.remove_file, stored.file.id)
    return json_response(FileDeleted(id=stored.file.id))


async def _find_file(request: web.Request) -> StoredFile:
    disk, file_id = disk_of(request), request.match_info["id"]
    decode_query(request.query, RequestPart)
    stored = await disk.do(disk.find_file, file_id, reach_of(request))
    if stored is None:
        raise _unknown(file_id)
    return stored


def _unknown(file_id: str) -> UnknownFileError:
    return UnknownFileError(f"no file {file_id[:64]!r} is kept here", param="id")


# Batches.


SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

decoder = BodyDecoder(BatchRequest)
_nothing = BodyDecoder(RequestPart)


async def create_batch(request: web.Request) -> web.Response:
    """Answer POST. Raises `RequestError`, and `UnknownBatchError` where none is run."""
    body = await decode_body(request, decoder)
    disk, owner = disk_of(request), owner_of(request)
    stored = await disk.do(disk.find_file, body.input_file_id, reach_of(request))
    if stored is None or stored.file.purpose != "batch":
        why = "is kept here" if stored is None else "of purpose batch is kept here"
        raise RequestError(
            f"no file {body.input_file_id[:64]!r} {why}: upload one to /v1/files",
            param="input_file_id",
        )
    await check_room(disk, owner, 0)
    made = _make(body, owner)
    async with disk.counting:  # of two at once, the second counts the first
        await disk.do(_check_number, disk, owner)
        is_kept = await disk.do(disk.add_batch, made)
    if not is_kept:
        raise RequestError("the input file has just been deleted", param="input_file_id")
    return json_response(made.batch)


def _make(body: BatchRequest, owner: str) -> StoredBatch:
    now, window = int(time.time()), body.completion_window
    batch = Batch(
        id=make_id("batch_"),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=window,
        created_at=now,
        expires_at=now + int(window[:-1]) * SECONDS[window[-1]],
        metadata=body.metadata,
    )
    kept = body.output_expires_after
    return StoredBatch(
        owner=owner,
        batch=batch,
        output_id=make_id("file-"),
        errors_id=make_id("file-"),
        output_seconds=None if kept is None else kept.seconds,
    )


def _check_number(disk: Disk, owner: str) -> None:
    """Raise `RequestError` if the owner has too many batches; called in a thread."""
    limit = disk.settings.max_batches
    own = [s for s in disk.list_batches(owner) if s.owner == owner and not s.batch.has_ended]
    if len(own) >= limit:
        raise RequestError(
            f"{len(own)} batches are unfinished, which is the limit (--max-batches): wait until "
            "one has ended, or cancel one"
        )


async def list_batches(request: web.Request) -> web.Response:
    """Answer GET for all, the newest first. Raises `RequestError` for a wrong query, and
    `UnknownBatchError` where none is run.
    """
    disk, page = disk_of(request), decode_query(request.query, BatchesPage)
    stored = await disk.do(disk.list_batches, reach_of(request))
    found = [s.batch for s in reversed(stored)]
    data, first_id, last_id, has_more = page_of(found, page.after, page.limit)
    return json_response(
        BatchList(data=data, first_id=first_id, last_id=last_id, has_more=has_more)
    )


async def get_batch(request: web.Request) -> web.Response:
    """Answer GET for one. Raises `UnknownBatchError`."""
    return json_response((await _find_batch(request)).batch)


async def cancel_batch(request: web.Request) -> web.Response:
    """Answer POST to cancel one; lines that were answered stay. Raises `UnknownBatchError`, and
    `RequestError` for a batch that is over, or about to be.
    """
    disk, stored = disk_of(request), await _find_batch(request)
    if request.can_read_body:
        await decode_body(request, _nothing)
    if stored.batch.status not in ("validating", "in_progress", "cancelling"):
        raise RequestError(
            f"batch {stored.batch.id} is {stored.batch.status}: it cannot be cancelled"
        )
    await disk.do(disk.cancel_batch, stored.batch.id)
    return json_response((await _find_batch(request)).batch)


async def _find_batch(request: web.Request) -> StoredBatch:
    disk, batch_id = disk_of(request), request.match_info["id"]
    decode_query(request.query, RequestPart)
    stored = await disk.do(disk.find_batch, batch_id, reach_of(request))
    if stored is None:
        raise UnknownBatchError(f"no batch {batch_id[:64]!r} is kept here", param="id")
    return stored


# The routes.


_FILE_ERRORS = (RequestError, UnknownFileError, UnknownBatchError)
_BATCH_ERRORS = (RequestError, UnknownBatchError)

ROUTES = (
    Route(
        "POST",
        "/v1/files",
        create_file,
        "Keep a file for batches.",
        FileObject,
        form=FileForm,
        raises=_BATCH_ERRORS,
    ),
    Route(
        "GET",
        "/v1/files",
        list_files,
        "The files that are kept.",
        FileList,
        query=FilesPage,
        raises=_BATCH_ERRORS,
    ),
    Route(
        "GET",
        "/v1/files/{id}",
        get_file,
        "A file that is kept.",
        FileObject,
        query=RequestPart,
        raises=_FILE_ERRORS,
    ),
    Route(
        "GET",
        "/v1/files/{id}/content",
        get_file_content,
        "The bytes of a file.",
        str,
        query=RequestPart,
        raises=_FILE_ERRORS,
        media_types=(CONTENT_TYPE,),
    ),
    Route(
        "DELETE",
        "/v1/files/{id}",
        delete_file,
        "Forget a file.",
        FileDeleted,
        query=RequestPart,
        raises=_FILE_ERRORS,
    ),
    Route(
        "POST",
        "/v1/batches",
        create_batch,
        "Run the requests of a file in the background.",
        Batch,
        body=decoder,
        example={
            "input_file_id": "file-0123",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"run": "first"},
            "output_expires_after": {"anchor": "created_at", "seconds": 86_400},
        },
        raises=_BATCH_ERRORS,
    ),
    Route(
        "GET",
        "/v1/batches",
        list_batches,
        "The batches that are kept.",
        BatchList,
        query=BatchesPage,
        raises=_BATCH_ERRORS,
    ),
    Route(
        "GET",
        "/v1/batches/{id}",
        get_batch,
        "A batch, and how far it is.",
        Batch,
        query=RequestPart,
        raises=_BATCH_ERRORS,
    ),
    Route(
        "POST",
        "/v1/batches/{id}/cancel",
        cancel_batch,
        "Have a batch end with what it has.",
        Batch,
        query=RequestPart,
        raises=_BATCH_ERRORS,
    ),
)


# A page out of a list of objects that have ids.


class _Named(Protocol):
    @property
    def id(self) -> str: ...


T = TypeVar("T", bound=_Named)


def page_of(
    found: Sequence[T], after: str | None, limit: int
) -> tuple[list[T], str | None, str | None, bool]:
    """Return the objects behind the one of the id `after`, `limit` of them at most; the ids of the
    first and the last of these; whether there are more. Raises `RequestError` for an unknown id.
    """
    begin = 0
    if after is not None:
        ids = [one.id for one in found]
        if after not in ids:
            raise RequestError(f"there is no {after[:64]!r} in the list", param="after")
        begin = ids.index(after) + 1
    told = list(found[begin : begin + limit])
    first, last = (told[0].id, told[-1].id) if told else (None, None)
    return told, first, last, begin + len(told) < len(found)


# A file on its way in: from the form of a request to a file of its own, a piece at a time. Its
# parts may come in any order. Knows the form; what is done with the file, its route knows.


WRITE_BYTES = 2**16  # bytes that are written at once
MAX_FIELD = 1024  # bytes of a part that is no file
MAX_NAME = 255  # characters of a file's name
CHECK_BYTES = 16 * MIB  # after which it is looked again how much there is

#: What aiohttp's reader of forms raises.
_UNREADABLE = (ValueError, AssertionError, HttpProcessingError, web.RequestPayloadError)
_PLAIN = ("identity", "binary", "8bit", "7bit")
_FIELDS = {field.encode_name for field in msgspec.structs.fields(FileForm)}


class Upload(NamedTuple):
    """A form that has come as a whole."""

    form: FileForm
    filename: str
    path: Path  # of the bytes; the caller's to remove
    size: int


async def receive(request: web.Request, disk: Disk) -> Upload:
    """Return the form, once it is whole. Raises `RequestError` for one that is wrong, too large, or
    does not fit on the disk, `HTTPUnsupportedMediaType` for what is no form. Nothing is left of
    what is refused.
    """
    if request.content_type != "multipart/form-data":
        got = request.headers.get(hdrs.CONTENT_TYPE, "no Content-Type")
        raise web.HTTPUnsupportedMediaType(
            reason=f"a file comes as multipart/form-data, got {got[:64]!r}"
        )
    path = disk.incoming / f"upload-{secrets.token_hex(16)}"
    try:
        return await _receive(request, disk, path)
    except BaseException:
        await disk.do(path.unlink, missing_ok=True)
        raise


async def _receive(request: web.Request, disk: Disk, path: Path) -> Upload:
    fields: dict[str, str] = {}
    filename, size = None, 0
    seconds = request.app[ENGINE].config.access.body_timeout
    try:
        reader = await request.multipart()
        while (part := await _in_time(reader.next(), seconds)) is not None:
            name = _name(part, {*fields, *(["file"] if filename is not None else [])})
            assert isinstance(part, BodyPartReader)
            if name == "file":
                filename = _filename(part)
                size = await _write(part, path, disk, owner_of(request), seconds)
            else:
                fields[name] = await _text(part, name, seconds)
    except _UNREADABLE as error:
        raise RequestError(f"the form cannot be read: {one_line(error)}") from error
    if filename is None:
        raise RequestError("the form has no part named file", param="file")
    try:
        form = msgspec.convert({**fields, "file": ""}, FileForm, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"the form: {error}", param=_param(str(error))) from error
    if (form.expires_after_anchor is None) != (form.expires_after_seconds is None):
        raise RequestError(
            "expires_after needs both anchor and seconds", param="expires_after[anchor]"
        )
    return Upload(form, filename, path, size)


async def _in_time(coming: Any, seconds: float) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await coming
    except TimeoutError:
        raise BodyTimeoutError(
            f"no further part of the form arrived within {seconds:g} s"
        ) from None


def _name(part: MultipartReader | BodyPartReader, seen: set[str]) -> str:
    name = part.name if isinstance(part, BodyPartReader) else None
    if name is None:
        raise RequestError("each part of the form must have a name")
    if name not in _FIELDS:
        raise UnknownFieldError(
            f"unknown field {name[:64]!r}; the form has {', '.join(sorted(_FIELDS))}",
            param=name[:64] if name.isprintable() else None,
        )
    if name in seen:
        raise RequestError(f"the form has {name} twice", param=name)
    for header in (hdrs.CONTENT_ENCODING, hdrs.CONTENT_TRANSFER_ENCODING):
        if (coding := part.headers.get(header, "binary")).lower() not in _PLAIN:
            raise RequestError(f"{name} is sent as {coding[:64]!r}: send it plain", param=name)
    return name


def _filename(part: BodyPartReader) -> str:
    name = part.filename or ""
    if not (name.isprintable() and 0 < len(name) <= MAX_NAME):
        raise RequestError(
            f"the file must have a name of up to {MAX_NAME} printable characters", param="file"
        )
    return name


async def _text(part: BodyPartReader, name: str, seconds: float) -> str:
    data = b""
    while chunk := await _in_time(part.read_chunk(MAX_FIELD), seconds):
        data += chunk
        if len(data) > MAX_FIELD:
            raise RequestError(f"{name} has more than {MAX_FIELD} bytes", param=name)
    return data.decode()


async def _write(part: BodyPartReader, path: Path, disk: Disk, owner: str, seconds: float) -> int:
    """Write the file of the form to `path`. Returns its size in bytes."""
    limit, size, checked = disk.settings.max_batch_file_mib * MIB, 0, -CHECK_BYTES  # at once
    file: BinaryIO = await disk.do(open, path, "xb", buffering=0, opener=private)
    try:
        buffer = bytearray()
        while True:
            chunk = await _in_time(part.read_chunk(WRITE_BYTES), seconds)
            buffer += chunk
            if not chunk or len(buffer) >= WRITE_BYTES:
                if size + len(buffer) > limit:
                    raise RequestError(
                        f"the file has more than {disk.settings.max_batch_file_mib} MiB "
                        "(--max-batch-file-mib)",
                        param="file",
                    )
                if not chunk or size - checked >= CHECK_BYTES:
                    await check_room(disk, owner, size + len(buffer), of_these_here=size)
                    checked = size
                await _put(disk, file, buffer)
                size += len(buffer)
                buffer = bytearray()
            if not chunk:
                await disk.do(os.fsync, file.fileno())
                return size
    finally:
        await disk.do(file.close)


async def _put(disk: Disk, file: BinaryIO, data: bytearray) -> None:
    try:
        written = 0
        while written < len(data):
            written += await disk.do(file.write, memoryview(data)[written:])
    except OSError as error:
        raise RequestError(f"the file cannot be kept: {error.strerror}", param="file") from error


def _param(message: str) -> str | None:
    return next((name for name in sorted(_FIELDS, key=len, reverse=True) if name in message), None)
