"""A file on its way in: from the form of a request to a file of its own, a piece at a time.

Its parts may come in any order. Knows the form; what is done with the file, its route knows.
"""

import asyncio
import os
import secrets
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
from aiohttp import BodyPartReader, MultipartReader, hdrs, web
from aiohttp.http import HttpProcessingError

from aioserve.errors import RequestError, one_line
from aioserve.server.access.gate import owner_of
from aioserve.server.batches.directory import Disk
from aioserve.server.batches.protocol import FileForm
from aioserve.server.batches.room import MIB, check_room
from aioserve.server.batches.stored import private
from aioserve.server.errors import BodyTimeoutError, UnknownFieldError
from aioserve.server.keys import ENGINE

PIECE = 2**16  # bytes that are written at once
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
    """The form, once it is whole. Raises `RequestError` for one that is wrong, too large, or does
    not fit on the disk, `HTTPUnsupportedMediaType` for what is no form. Nothing is left of what is
    refused.
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
        raise BodyTimeoutError(f"no more of the form came for {seconds:g} s") from None


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
            chunk = await _in_time(part.read_chunk(PIECE), seconds)
            buffer += chunk
            if not chunk or len(buffer) >= PIECE:
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
