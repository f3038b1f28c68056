"""POST /v1/abort: end a running request from outside.

Its reader gets what there is, with finish reason `abort`.
"""

import msgspec
from aiohttp import web

from aioserve.operations import AbortElsewhere
from aioserve.server.access.gate import reach_of
from aioserve.server.body import decode_body
from aioserve.server.errors import UnknownRequestError
from aioserve.server.keys import ENGINE, RUNNING
from aioserve.server.openapi import Route
from aioserve.server.protocol import RequestPart
from aioserve.server.validation import BodyDecoder


class AbortRequest(RequestPart, kw_only=True):
    """The JSON body of POST /v1/abort, which names the request to abort."""

    request_id: str  # of a response, or of one of its prompts


class Aborted(msgspec.Struct, kw_only=True):
    """The response of POST /v1/abort, which repeats the id of the request."""

    request_id: str
    aborted: bool = True


decoder = BodyDecoder(AbortRequest)
_encoder = msgspec.json.Encoder()


async def abort_request(request: web.Request) -> web.Response:
    """Handle POST /v1/abort. Raises `UnknownRequestError` if no running request has the id."""
    body = await decode_body(request, decoder)
    reach = reach_of(request)
    is_here = request.app[RUNNING].abort(body.request_id, reach)
    if not (is_here or await request.app[ENGINE].ask(AbortElsewhere(body.request_id, reach))):
        raise UnknownRequestError(
            f"no request {body.request_id[:128]!r} is running", param="request_id"
        )
    return web.Response(
        body=_encoder.encode(Aborted(request_id=body.request_id)), content_type="application/json"
    )


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
