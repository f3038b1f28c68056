"""From an HTTP request to a decoded body that is meant for this server.

What every route with a body shares. Knows nothing about what the body asks for.
"""

from typing import TypeVar

from aiohttp import web

from aioserve.server.errors import UnknownModelError
from aioserve.server.keys import ENGINE
from aioserve.server.protocol import ModelRequest, RequestPart
from aioserve.server.validation import BodyDecoder

T = TypeVar("T", bound=RequestPart)


async def decode_body(request: web.Request, decoder: BodyDecoder[T]) -> T:
    """The decoded body. Raises `RequestError`; `UnknownModelError` for a model that is not here."""
    config = request.app[ENGINE].config
    body = decoder.decode(await request.read(), ignore_unknown=config.server.ignore_unknown_fields)
    model = body.model if isinstance(body, ModelRequest) else None
    if model not in (None, config.model.served_name):
        raise UnknownModelError(
            f"model {model!r} does not exist; this server has {config.model.served_name!r}",
            param="model",
        )
    return body
