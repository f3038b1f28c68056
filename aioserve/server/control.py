"""What operators do to a running server: pause, sleep, other weights, a shadow, the log.

Decodes and answers; what is done is the engine's business. On the admin routes alone.
"""

from typing import Any, Literal

import msgspec
from aiohttp import web

from aioserve.config import LogLevel
from aioserve.engine.questions import (
    Arrivals,
    EngineState,
    Pause,
    Question,
    Reload,
    Resume,
    Running,
    SetLogLevel,
    Sleep,
    SwitchShadow,
    Wake,
)
from aioserve.errors import ConfigError, PolicyError, RequestError
from aioserve.server.body import decode_body
from aioserve.server.keys import ENGINE
from aioserve.server.protocol import RequestPart, Text
from aioserve.server.validation import BodyDecoder, check_path

_encoder = msgspec.json.Encoder()


class PauseRequest(RequestPart, kw_only=True):
    """Body of POST /admin/pause."""

    running: Running = "keep"
    arrivals: Arrivals = "wait"


class SleepRequest(PauseRequest, kw_only=True):
    """Body of POST /admin/sleep."""

    weights: bool = False  # whether they go as well


class ReloadRequest(RequestPart, kw_only=True):
    """Body of POST /admin/reload."""

    path: Text
    running: Running = "keep"


class LogLevelRequest(RequestPart, kw_only=True):
    """Body of POST /admin/log_level."""

    level: LogLevel


class ShadowRequest(RequestPart, kw_only=True):
    """Body of POST /admin/shadow."""

    policy: str | None  # null: none
    options: dict[str, Any] | None = None


class Done(msgspec.Struct):
    """Response where there is nothing to tell."""

    status: Literal["ok"] = "ok"


def _decoder(kind: type[RequestPart]) -> BodyDecoder[Any]:
    return BodyDecoder(kind, {}, shared={}, hints=())


pause_decoder = _decoder(PauseRequest)
sleep_decoder = _decoder(SleepRequest)
reload_decoder = _decoder(ReloadRequest)
log_level_decoder = _decoder(LogLevelRequest)
shadow_decoder = _decoder(ShadowRequest)


async def pause(request: web.Request) -> web.Response:
    """POST /admin/pause: answered when no step is computed any more."""
    body: PauseRequest = await _read(request, pause_decoder)
    return await _state(request, Pause(body.running, body.arrivals))


async def resume(request: web.Request) -> web.Response:
    """POST /admin/resume."""
    return await _state(request, Resume())


async def sleep(request: web.Request) -> web.Response:
    """POST /admin/sleep: answered when the memory is free."""
    body: SleepRequest = await _read(request, sleep_decoder)
    return await _state(request, Sleep(body.weights, body.running, body.arrivals))


async def wake(request: web.Request) -> web.Response:
    """POST /admin/wake: answered when it serves."""
    return await _state(request, Wake())


async def reload(request: web.Request) -> web.Response:
    """POST /admin/reload: answered when the next step has the new weights."""
    body: ReloadRequest = await decode_body(request, reload_decoder)
    check_path(body.path, "path")
    return await _state(request, Reload(body.path, body.running), param="path")


async def set_log_level(request: web.Request) -> web.Response:
    """POST /admin/log_level: in all processes of the server."""
    body: LogLevelRequest = await decode_body(request, log_level_decoder)
    await request.app[ENGINE].ask(SetLogLevel(body.level))
    return _json(Done())


async def switch_shadow(request: web.Request) -> web.Response:
    """POST /admin/shadow: another shadow policy on the traffic from now on; a bad one changes
    nothing.
    """
    body: ShadowRequest = await decode_body(request, shadow_decoder)
    await _ask(request, SwitchShadow(body.policy, body.options or {}), param="policy")
    return _json(Done())


async def _read(request: web.Request, decoder: BodyDecoder[Any]) -> Any:
    """The body; without one, what there is by default."""
    if not request.can_read_body:
        return decoder.decode(b"{}")
    return await decode_body(request, decoder)


async def _state(
    request: web.Request, question: Question[EngineState], param: str | None = None
) -> web.Response:
    return _json(await _ask(request, question, param))


async def _ask(request: web.Request, question: Question[Any], param: str | None) -> Any:
    """What cannot be done is the request's fault: a 400 that says why."""
    try:
        return await request.app[ENGINE].ask(question)
    except (ConfigError, PolicyError) as error:
        raise RequestError(str(error), param=param) from error


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=_encoder.encode(body), content_type="application/json")
