"""From an HTTP request to a decoded body that is meant for this server.

What every route with a body shares. Knows nothing about what the body asks for.
"""

import asyncio
from typing import TypeVar

from aiohttp import hdrs, web

from aioserve.server.access.access import ACCESS
from aioserve.server.errors import BodiesFullError, BodyTimeoutError
from aioserve.server.keys import ENGINE
from aioserve.server.passed_over import pass_over
from aioserve.server.protocol import ModelRequest, RequestPart
from aioserve.server.validation import BodyDecoder

T = TypeVar("T", bound=RequestPart)


# Bytes of a body that may come whatever others keep: about as many wait in the buffer of its
# connection anyway, and most conversations are shorter.
SMALL_BODY = 2**16

RETRY_SECONDS = 1.0  # A guess: bodies come within a second, or hardly at all.


async def _read(request: web.Request) -> bytes | bytearray:
    """All of it, in time. Raises `HTTPRequestEntityTooLarge`, before it has come if its length is
    told, `BodyTimeoutError` and `BodiesFullError`.
    """
    length, limit = request.content_length, request.client_max_size
    if length is not None and length > limit:
        raise web.HTTPRequestEntityTooLarge(limit, length)
    if request.content.is_eof():
        return await request.read()
    seconds = request.app[ENGINE].config.access.body_timeout
    try:
        async with asyncio.timeout(seconds):
            return await _gather(request)
    except TimeoutError:
        raise BodyTimeoutError(f"the body took more than {seconds:g} s to come") from None


async def _gather(request: web.Request) -> bytearray:
    access, config = request.app[ACCESS], request.app[ENGINE].config
    limit, body = request.client_max_size, bytearray()
    of_all = config.access.max_bodies_mib * 2**20 // (config.server.api_workers or 1)
    try:
        while chunk := await request.content.readany():
            body += chunk
            access.body_bytes += len(chunk)
            if len(body) > limit:
                raise web.HTTPRequestEntityTooLarge(limit, len(body))
            if len(body) > SMALL_BODY and access.body_bytes > max(of_all, limit):
                raise BodiesFullError(
                    f"{access.body_bytes / 2**20:.0f} MiB of bodies are still coming, more than "
                    "this server keeps: try again",
                    RETRY_SECONDS,
                )
    finally:
        access.body_bytes -= len(body)
    return body


def _check_type(request: web.Request) -> None:
    """A browser lets any page send the types of forms and bodies without one, unasked. Raises
    `HTTPUnsupportedMediaType` for what is not declared to be JSON.
    """
    declared = request.headers.get(hdrs.CONTENT_TYPE)
    # Without parameters such as a charset. aiohttp would read it as a header of a mail, whose
    # brackets are comments, in one another: some thousand of them are an error of Python's.
    kind = (declared or "").partition(";")[0].strip().lower()
    if declared is None or not (kind == "application/json" or kind.endswith("+json")):
        got = "no Content-Type" if declared is None else f"{declared[:64]!r}"
        raise web.HTTPUnsupportedMediaType(
            reason=f"the body must have Content-Type application/json, got {got}; with curl: "
            "-H 'Content-Type: application/json'"
        )


async def decode_body(request: web.Request, decoder: BodyDecoder[T]) -> T:
    """The decoded body. Raises `RequestError`; `UnknownModelError` for a model that is not here;
    `HTTPUnsupportedMediaType` for a body that is not declared to be JSON.
    """
    if request.can_read_body:
        _check_type(request)
    engine = request.app[ENGINE]
    ignore_unknown = engine.config.server.ignore_unknown_fields
    body = decoder.decode(await _read(request), ignore_unknown=ignore_unknown)
    asked = (what for n, what in decoder.skipped.items() if getattr(body, n) not in (None, []))
    pass_over(request, asked)
    if isinstance(body, ModelRequest):
        if body.model is not None and body.model not in engine.config.model.served_names:
            engine.adapters.check_name(body.model)
    return body
