"""Which pages a browser lets ask this server: CORS, as the Fetch standard has it.

Refuses what a browser sends for a page without asking first. Knows headers; knows nothing about
keys, which such a page must send like any client.
"""

from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from aioserve.config import AccessConfig
from aioserve.errors import ForbiddenError
from aioserve.server.errors import ForeignOriginError
from aioserve.server.keys import ACCESS, HOSTS

#: What else of an answer a page may read.
EXPOSED = "X-Request-Id, Request-Id, Retry-After"

MAX_AGE = "600"  # seconds in which a browser need not ask again


@web.middleware
async def check_caller(request: web.Request, handler: Handler) -> web.StreamResponse:
    """No page of the web reaches a handler through a browser of this network: neither under a name
    that was made to point here, nor, where no key would stop it, from another origin. Raises
    `ForeignHostError` and `ForeignOriginError`.
    """
    hosts = request.app[HOSTS]
    hosts.check(request)
    if not hosts.asks_keys:
        check_page(request)
    return await handler(request)


@web.middleware
async def answer_preflights(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers what a browser asks before a page of another origin may: for a server that allows
    some origins. Raises `ForbiddenError` for one that may not.
    """
    settings = request.app[ACCESS].settings
    asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
    origin = request.headers.get(hdrs.ORIGIN)
    is_preflight = request.method == hdrs.METH_OPTIONS and asked is not None and origin is not None
    if not is_preflight:
        return await handler(request)
    if not _is_allowed(settings, origin):
        raise ForbiddenError(f"origin {_short(origin)} is not in access.allowed_origins")
    if settings.allowed_methods and asked not in settings.allowed_methods:
        raise ForbiddenError(f"method {_short(asked)} is not in access.allowed_methods")
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    names = [name.strip().lower() for name in wanted.split(",") if name.strip()]
    known = {name.lower() for name in settings.allowed_headers}
    for name in names if known else ():
        if name not in known:
            raise ForbiddenError(f"header {_short(name)} is not in access.allowed_headers")
    headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: str(asked), "Access-Control-Max-Age": MAX_AGE}
    if names:  # by name: a star would not stand for Authorization
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = ", ".join(names)
    return web.Response(status=204, headers=headers)


async def tell_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Signal handler, before headers leave, of a server that allows some origins: whether the page
    that asked may read the answer.
    """
    settings = request.app[ACCESS].settings
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    origin = request.headers.get(hdrs.ORIGIN)
    if not _is_allowed(settings, origin):
        return
    response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = str(origin)
    response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED
    if settings.allow_credentials:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS] = "true"


def check_page(request: web.Request) -> None:
    """Raises `ForeignOriginError` if a browser sends this for a page that is neither this server's
    own nor of an allowed origin: what it need not ask about, such as a POST without a body, it
    sends, and only keeps the answer from the page.
    """
    origin, site = request.headers.get(hdrs.ORIGIN), request.headers.get("Sec-Fetch-Site")
    if request.method in (hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS):
        return
    # No page can write this header. Behind a proxy that renames the host it alone tells the truth.
    if site in ("same-origin", "none") or (origin is None and site is None):
        return
    # The host alone: behind a proxy the scheme is another one.
    is_own = origin is not None and urlsplit(origin).netloc == request.host
    if not (is_own or _is_allowed(request.app[HOSTS].settings, origin)):
        raise ForeignOriginError(
            f"{request.path} does not take requests of pages of {_short(origin)}: it is neither "
            "this server nor one of access.allowed_origins"
        )


def _is_allowed(settings: AccessConfig, origin: str | None) -> bool:
    return origin is not None and (
        "*" in settings.allowed_origins or origin in settings.allowed_origins
    )


def _short(text: str | None) -> str:
    return repr(str(text)[:64])
