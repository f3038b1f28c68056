"""CORS, as the Fetch standard has it, for a server that allows pages of other origins.

Knows headers; knows nothing about keys, which such a page must send like any client.
"""

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from aioserve.errors import ForbiddenError
from aioserve.server.access.access import ACCESS
from aioserve.server.access.origins import is_allowed, shortened

#: What else of an answer a page may read.
EXPOSED = "X-Request-Id, Request-Id, Retry-After"

MAX_AGE = "600"  # seconds in which a browser need not ask again


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
    if not is_allowed(settings, origin):
        raise ForbiddenError(f"origin {shortened(origin)} is not in access.allowed_origins")
    if settings.allowed_methods and asked not in settings.allowed_methods:
        raise ForbiddenError(f"method {shortened(asked)} is not in access.allowed_methods")
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
    names = [name.strip().lower() for name in wanted.split(",") if name.strip()]
    known = {name.lower() for name in settings.allowed_headers}
    for name in names if known else ():
        if name not in known:
            raise ForbiddenError(f"header {shortened(name)} is not in access.allowed_headers")
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
    if not is_allowed(settings, origin):
        return
    response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = str(origin)
    response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED
    if settings.allow_credentials:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS] = "true"
