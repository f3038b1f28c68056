"""The files of the page: plain HTML, style and modules that a browser reads as they lie here.

Says what a browser may do with them, which is little. Knows nothing about what they show.
"""

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from aiohttp import hdrs, web

from aioserve.server.errors import UnknownFileError
from aioserve.server.openapi import Route

FOLDER = Path(__file__).parent
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
    """All files of the page, by name."""
    files = {}
    for path in sorted(FOLDER.iterdir()):
        if (content_type := CONTENT_TYPES.get(path.suffix)) is not None:
            content = path.read_bytes()
            etag = hashlib.sha256(content).hexdigest()[:32]
            files[path.name] = File(content, content_type, etag)
    return files


async def show_page(request: web.Request) -> web.Response:
    """GET /: the HTML of the page."""
    return _answer(request, read_files()["page.html"])


async def get_file(request: web.Request) -> web.Response:
    """GET /page/{name}: what it is made of."""
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
)
