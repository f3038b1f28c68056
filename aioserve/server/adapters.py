"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them.

Admin routes: they read paths of this machine. Knows nothing about files or weights.
"""

from aiohttp import web

from aioserve.engine.questions import LoadAdapter, UnloadAdapter
from aioserve.errors import ConfigError, RequestError
from aioserve.model_source.adapter import NoAdapterError
from aioserve.server.body import decode_body
from aioserve.server.errors import UnknownAdapterError
from aioserve.server.keys import ENGINE
from aioserve.server.protocol import RequestPart, Text
from aioserve.server.unserved import NOT_ON_LOAD_ADAPTER, NOT_ON_UNLOAD_ADAPTER
from aioserve.server.validation import BodyDecoder, check_path


class LoadRequest(RequestPart, kw_only=True):
    """Body of POST /v1/load_lora_adapter."""

    lora_name: Text
    lora_path: Text


class UnloadRequest(RequestPart, kw_only=True):
    """Body of POST /v1/unload_lora_adapter."""

    lora_name: Text


load_decoder = BodyDecoder(LoadRequest, NOT_ON_LOAD_ADAPTER, shared={}, hints=())
unload_decoder = BodyDecoder(UnloadRequest, NOT_ON_UNLOAD_ADAPTER, shared={}, hints=())


async def load_adapter(request: web.Request) -> web.Response:
    """The handler. Returns when requests may name it; others run on meanwhile."""
    body = await decode_body(request, load_decoder)
    check_path(body.lora_path, "lora_path")
    try:
        await request.app[ENGINE].ask(LoadAdapter(body.lora_name, body.lora_path))
    except NoAdapterError as error:
        raise UnknownAdapterError(str(error), param="lora_path") from error
    except ConfigError as error:
        raise RequestError(str(error)) from error
    return web.Response(text=f"Success: LoRA adapter {body.lora_name!r} added successfully.")


async def unload_adapter(request: web.Request) -> web.Response:
    """The handler. Requests that have it finish."""
    body = await decode_body(request, unload_decoder)
    await request.app[ENGINE].ask(UnloadAdapter(body.lora_name))
    return web.Response(text=f"Success: LoRA adapter {body.lora_name!r} removed successfully.")
