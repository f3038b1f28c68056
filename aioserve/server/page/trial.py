"""Another policy on the live traffic: POST /admin/try_policy, and the report that comes of it.

A report is a page of its own: it may run the scripts that are in it, and ask nobody for anything.
"""

from typing import Any

import msgspec
from aiohttp import web

from aioserve.engine.questions import FindReport, TryPolicy
from aioserve.errors import ConfigError, PolicyError, RequestError
from aioserve.server.body import decode_body
from aioserve.server.errors import UnknownFileError
from aioserve.server.keys import ENGINE
from aioserve.server.protocol import RequestPart
from aioserve.server.validation import BodyDecoder

# In a frame of the page it is a stranger there: it sees no key, whatever is in it.
HEADERS = {
    "Content-Security-Policy": (
        "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; "
        "style-src 'unsafe-inline'; frame-ancestors 'self'"
    ),
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

_encoder = msgspec.json.Encoder()


class TrialRequest(RequestPart, kw_only=True):
    """Body of POST /admin/try_policy."""

    policy: str
    options: dict[str, Any] | None = None
    seconds: float | None = None  # to record; None: until `requests` came, 300 at most
    requests: int | None = None  # after which the recording ends; None: 200 without `seconds`


class Trial(msgspec.Struct):
    """Response of /admin/try_policy."""

    report: str  # where it can be read, relative to the server's root
    requests: int  # that came while it was recorded, and were given to both policies
    missing: int  # requests more, and every difference would have an interval
    table: str  # the comparison in words


decoder = BodyDecoder(TrialRequest, {}, shared={}, hints=())


async def try_policy(request: web.Request) -> web.Response:
    """POST /admin/try_policy: records requests, and simulates them under both policies."""
    body = await decode_body(request, decoder)
    question = TryPolicy(body.policy, body.options or {}, body.seconds, body.requests)
    try:
        report = await request.app[ENGINE].ask(question)
    except (ConfigError, PolicyError) as error:
        raise RequestError(str(error), param="policy") from error
    path = f"watch/reports/{report.report_id}"
    trial = Trial(path, report.num_requests, report.num_missing, report.words)
    return web.Response(body=_encoder.encode(trial), content_type="application/json")


async def get_report(request: web.Request) -> web.Response:
    """GET /watch/reports/{id}: needs no key but the id, which nobody can guess."""
    html = await request.app[ENGINE].ask(FindReport(request.match_info["id"]))
    if html is None:
        raise UnknownFileError("there is no such report, or it is forgotten: try again")
    return web.Response(body=html, content_type="text/html", charset="utf-8", headers=HEADERS)
