"""The report that comes of a trial of another policy, which is asked for by POST /admin/try_policy.

A report is a page of its own: it may run the scripts that are in it, and fetch nothing.
"""

from aiohttp import web

from aioserve.errors import EngineDeadError
from aioserve.operations import FindReport
from aioserve.server.errors import UnknownFileError
from aioserve.server.keys import ENGINE
from aioserve.server.openapi import Route

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


async def get_report(request: web.Request) -> web.Response:
    """GET /watch/reports/{id}: needs no key but the id, which cannot be guessed."""
    html = await request.app[ENGINE].ask(FindReport(request.match_info["id"]))
    if html is None:
        raise UnknownFileError("there is no such report, or it is forgotten: try again")
    return web.Response(body=html, content_type="text/html", charset="utf-8", headers=HEADERS)


ROUTES = (
    Route(
        "GET",
        "/watch/reports/{id}",
        get_report,
        "A comparison of policies that was asked for.",
        str,
        raises=(UnknownFileError, EngineDeadError),
        media_types=("text/html",),
        needs="nothing",
    ),
)
