"""The routes that command a running server: one for each operators' command, and POST /v1/abort.

Decodes, asks the engine and answers. A command declares what its route is made of; which fields
vLLM has besides is known here.
"""

from typing import Any

import msgspec
from aiohttp import web

from aioserve.engine.operations import AbortElsewhere, OperatorCommand
from aioserve.engine.operations.command import FilePath
from aioserve.errors import ConfigError, PolicyError
from aioserve.server.access.gate import reach_of
from aioserve.server.body import BodyDecoder, Route, check_path, decode_body, json_response
from aioserve.server.errors import UnknownRequestError
from aioserve.server.protocol import RequestPart
from aioserve.server.running import ENGINE, RUNNING


def route_of(command: type[OperatorCommand[Any, Any]]) -> Route:
    """Return the route by which the command is given; a body without fields is not looked at."""
    http, fields = command.http, msgspec.structs.fields(command)
    paths = [field.encode_name for field in fields if field.type == FilePath]
    may_lack_body = not any(field.required for field in fields)
    decoder = _decoder(command) if fields else None

    async def handle(request: web.Request) -> web.Response:
        values: list[Any] = []
        if decoder is not None:
            is_empty = may_lack_body and not request.can_read_body
            body = decoder.decode(b"{}") if is_empty else await decode_body(request, decoder)
            for name in paths:
                check_path(getattr(body, name), name)
            values = [getattr(body, field.encode_name) for field in fields]
        given = command(*values)
        try:
            told = given.tell(await request.app[ENGINE].ask(given))
        except (ConfigError, PolicyError) as error:
            raise given.refusal(error) from error
        if isinstance(told, str):
            return web.Response(text=told)
        return json_response(told)

    handle.__name__ = command.operation()
    return Route(
        http.method,
        http.path,
        handle,
        http.summary,
        command.told_type,
        body=decoder,
        raises=http.raises,
        needs="admin_key",
        may_lack_body=bool(fields) and may_lack_body,
    )


def _decoder(command: type[OperatorCommand[Any, Any]]) -> BodyDecoder[RequestPart]:
    """Return a decoder of a struct with the same fields, which refuses all others."""
    http = command.http
    body = msgspec.defstruct(
        http.schema or f"{command.__name__}Request",
        [_field(field) for field in msgspec.structs.fields(command)],
        bases=(RequestPart,),
        namespace={"__doc__": f"Body of {http.method} {http.path}."},
        module=command.__module__,
        kw_only=True,
    )
    return BodyDecoder(body, http.path.rpartition("/")[2])  # type: ignore[arg-type]


def _field(field: msgspec.structs.FieldInfo) -> Any:
    """Describe a field of a struct to `msgspec.defstruct`."""
    if field.required:
        return (field.encode_name, field.type)
    if field.default is msgspec.NODEFAULT:
        factory = msgspec.field(default_factory=field.default_factory)
        return (field.encode_name, field.type, factory)
    return (field.encode_name, field.type, field.default)


# POST /v1/abort: end a running request from outside. Its reader gets what there is, with finish
# reason `abort`.


class AbortRequest(RequestPart, kw_only=True):
    """The JSON body of POST /v1/abort, which names the request to abort."""

    request_id: str  # of a response, or of one of its prompts


class Aborted(msgspec.Struct, kw_only=True):
    """The response of POST /v1/abort, which repeats the id of the request."""

    request_id: str
    aborted: bool = True


decoder = BodyDecoder(AbortRequest)


async def abort_request(request: web.Request) -> web.Response:
    """Handle POST /v1/abort. Raises `UnknownRequestError` if no running request has the id."""
    body = await decode_body(request, decoder)
    reach = reach_of(request)
    is_here = request.app[RUNNING].abort(body.request_id, reach)
    if not (is_here or await request.app[ENGINE].ask(AbortElsewhere(body.request_id, reach))):
        raise UnknownRequestError(
            f"no request {body.request_id[:128]!r} is running", param="request_id"
        )
    return json_response(Aborted(request_id=body.request_id))


ROUTES = (
    Route(
        "POST",
        "/v1/abort",
        abort_request,
        "End a running request.",
        Aborted,
        body=decoder,
        example={"request_id": "cmpl-1"},
        raises=(UnknownRequestError,),
    ),
)
