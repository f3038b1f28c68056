"""From an HTTP request to a decoded body that is meant for this server.

What every route with a body shares. Knows nothing about what the body asks for.
"""

from typing import TypeVar

from aiohttp import web

from aioserve.server.keys import ENGINE
from aioserve.server.protocol import ModelRequest, RequestPart
from aioserve.server.validation import BodyDecoder

T = TypeVar("T", bound=RequestPart)


async def decode_body(request: web.Request, decoder: BodyDecoder[T]) -> T:
    """The decoded body. Raises `RequestError`; `UnknownModelError` for a model that is not here."""
    engine = request.app[ENGINE]
    ignore_unknown = engine.config.server.ignore_unknown_fields
    body = decoder.decode(await request.read(), ignore_unknown=ignore_unknown)
    if isinstance(body, ModelRequest) and body.model is not None:
        engine.adapters.check_name(body.model)
    return body
