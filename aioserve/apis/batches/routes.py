"""/v1/batches: requests of a file, run in the background, as OpenAI's API has it.

This module contains the HTTP handlers; `runner` and `work` run the batches.
"""

import time

import msgspec
from aiohttp import web

from aioserve.apis.batches.disk import Disk, StoredBatch, check_room, disk_of, make_id
from aioserve.apis.batches.files import page_of
from aioserve.apis.batches.protocol import Batch, BatchesPage, BatchList, BatchRequest
from aioserve.errors import RequestError
from aioserve.server.access.gate import owner_of, reach_of
from aioserve.server.body import (
    BodyDecoder,
    Route,
    decode_body,
    decode_query,
)
from aioserve.server.errors import UnknownBatchError
from aioserve.server.protocol import RequestPart

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

decoder = BodyDecoder(BatchRequest)
_encoder = msgspec.json.Encoder()


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
    return _json(made.batch)


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
    return _json(BatchList(data=data, first_id=first_id, last_id=last_id, has_more=has_more))


async def get_batch(request: web.Request) -> web.Response:
    """Answer GET for one. Raises `UnknownBatchError`."""
    return _json((await _find(request)).batch)


async def cancel_batch(request: web.Request) -> web.Response:
    """Answer POST to cancel one; lines that were answered stay. Raises `UnknownBatchError`, and
    `RequestError` for a batch that is over, or about to be.
    """
    disk, stored = disk_of(request), await _find(request)
    if request.can_read_body:
        await decode_body(request, _nothing)
    if stored.batch.status not in ("validating", "in_progress", "cancelling"):
        raise RequestError(
            f"batch {stored.batch.id} is {stored.batch.status}: it cannot be cancelled"
        )
    await disk.do(disk.cancel_batch, stored.batch.id)
    return _json((await _find(request)).batch)


_nothing = BodyDecoder(RequestPart)


async def _find(request: web.Request) -> StoredBatch:
    disk, batch_id = disk_of(request), request.match_info["id"]
    decode_query(request.query, RequestPart)
    stored = await disk.do(disk.find_batch, batch_id, reach_of(request))
    if stored is None:
        raise UnknownBatchError(f"no batch {batch_id[:64]!r} is kept here", param="id")
    return stored


def _json(told: msgspec.Struct) -> web.Response:
    return web.Response(body=_encoder.encode(told), content_type="application/json")


_ERRORS = (RequestError, UnknownBatchError)

ROUTES = (
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
        raises=_ERRORS,
    ),
    Route(
        "GET",
        "/v1/batches",
        list_batches,
        "The batches that are kept.",
        BatchList,
        query=BatchesPage,
        raises=_ERRORS,
    ),
    Route(
        "GET",
        "/v1/batches/{id}",
        get_batch,
        "A batch, and how far it is.",
        Batch,
        query=RequestPart,
        raises=_ERRORS,
    ),
    Route(
        "POST",
        "/v1/batches/{id}/cancel",
        cancel_batch,
        "Have a batch end with what it has.",
        Batch,
        query=RequestPart,
        raises=_ERRORS,
    ),
)
