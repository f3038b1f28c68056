"""The page that shows the scheduler at work: its files, the stream of steps, reports of trials.

The files are plain HTML, style and modules that a browser reads as they lie here. Says what a
browser may do with them, which is little.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from aiohttp import hdrs, web

from aioserve.engine.live_feed import Frame, Snapshot
from aioserve.engine.operations import FindReport, ShowSteps
from aioserve.errors import AioserveError, EngineDeadError, RequestError
from aioserve.server.body import Route
from aioserve.server.errors import UnknownFileError, to_wire
from aioserve.server.generation import EventStream, event
from aioserve.server.protocol import ErrorResponse
from aioserve.server.running import ENGINE

FOLDER = Path(__file__).parent
TRIAL = "/admin/try_policy"  # the page asks for it
CONTENT_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

# Nothing from elsewhere, nothing inline, no page around it; a report of ours in a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    hdrs.CACHE_CONTROL: "no-cache",  # kept, and asked for anew: 304 unless the server is another
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class File(NamedTuple):
    """A file of the page, as it is served."""

    content: bytes
    content_type: str
    etag: str


@cache
def read_files() -> dict[str, File]:
    """Return all files of the page, by name."""
    files = {}
    for path in sorted(FOLDER.iterdir()):
        if (content_type := CONTENT_TYPES.get(path.suffix)) is not None:
            content = path.read_bytes()
            etag = hashlib.sha256(content).hexdigest()[:32]
            files[path.name] = File(content, content_type, etag)
    return files


@cache
def page_without_trials() -> File:
    """Return the page of a server without admin routes: its buttons of trials are grey, beside the
    line that turns them on.
    """
    content = read_files()["page.html"].content.replace(b"<body>", b'<body class="no-trials">')
    return File(content, CONTENT_TYPES[".html"], hashlib.sha256(content).hexdigest()[:32])


async def show_page(request: web.Request) -> web.Response:
    """GET /: the HTML of the page, which says whether this server has the routes of trials."""
    has_trials = any(resource.canonical == TRIAL for resource in request.app.router.resources())
    return _answer(request, read_files()["page.html"] if has_trials else page_without_trials())


async def get_file(request: web.Request) -> web.Response:
    """Answer GET /page/{name}, the scripts and styles of the page."""
    name = request.match_info["name"]
    file = read_files().get(name)
    if file is None:
        raise UnknownFileError(f"the page has no file {name!r:.100}")
    return _answer(request, file)


def _answer(request: web.Request, file: File) -> web.Response:
    etags = request.if_none_match or ()
    if any(etag.value in (file.etag, "*") for etag in etags):
        response = web.Response(status=304, headers=HEADERS)
    else:
        response = web.Response(
            body=file.content, content_type=file.content_type, charset="utf-8", headers=HEADERS
        )
    response.etag = file.etag
    return response


# The stream of steps: what the scheduler does, told to clients that watch. Asks the engine for the
# next frames when the last are written, so a reader that sleeps costs a socket's buffer and no
# more. Knows nothing about what is in a frame.


async def stream_steps(request: web.Request) -> web.StreamResponse:
    """GET /watch/steps: a snapshot, then a frame whenever something has happened."""
    if request.method == "HEAD":
        return web.Response(content_type="text/event-stream")
    engine, stream, number = request.app[ENGINE], EventStream(request), 0
    while True:
        try:
            seen = await engine.ask(ShowSteps(number))
        except AioserveError as error:
            if not stream.started:
                raise
            return await stream.end(event(to_wire(error)[1]))
        number = seen.number
        await stream.send(b"".join(b"data: " + frame + b"\n\n" for frame in seen.frames))


# The report that comes of a trial of another policy, which is asked for by POST /admin/try_policy.
# A report is a page of its own: it may run the scripts that are in it, and fetch nothing.


# In a frame of the page it is a stranger there: it sees no key, whatever is in it.
REPORT_HEADERS = {
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
        raise UnknownFileError("there is no such report, or it was deleted: run the trial again")
    return web.Response(
        body=html, content_type="text/html", charset="utf-8", headers=REPORT_HEADERS
    )


ROUTES = (
    Route(
        "GET",
        "/",
        show_page,
        "A page that shows the scheduler at work.",
        str,
        media_types=("text/html",),
        needs="nothing",
    ),
    Route(
        "GET",
        "/page/{name}",
        get_file,
        "What the page is made of.",
        str,
        raises=(UnknownFileError,),
        media_types=("text/html", "text/css", "text/javascript"),
        needs="nothing",
    ),
    Route(
        "GET",
        "/watch/steps",
        stream_steps,
        "What the scheduler does, as it does it.",
        str,
        events=(Snapshot, Frame, ErrorResponse),
        raises=(RequestError, EngineDeadError),
        media_types=("text/event-stream",),
        needs="looker",  # it tells of all clients' requests
    ),
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
