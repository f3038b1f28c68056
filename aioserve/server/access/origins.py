"""Which pages and names may reach this server: origins, host names, and addresses without a key.

Knows headers; knows nothing about keys, which a page must send like any client.
"""

import ipaddress
import logging
from collections.abc import Sequence
from functools import lru_cache
from socket import AF_UNIX, socket
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from aioserve.config import AccessConfig, EngineConfig
from aioserve.errors import ConfigError
from aioserve.server.access.access import Access
from aioserve.server.errors import ForeignHostError, ForeignOriginError
from aioserve.server.sockets import ListenSockets, url_of

#: Names below these belong to a local network: a registrar sells none of them.
LOCAL_NAMES = ("local", "internal", "home.arpa", "localhost")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches what listens on `host`, a name or an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_near(request: web.Request) -> bool:
    """Return whether the request comes from this machine, not by a proxy that names another
    client.
    """
    if any(name in request.headers for name in ("Forwarded", "X-Forwarded-For", "X-Real-IP")):
        return False
    return _is_by_unix_socket(request) or is_loopback(request.remote or "")


class Hosts:
    """The names of one application. It checks names where neither a key nor a certificate already
    keeps pages of the web away, and everywhere if the settings name some.
    """

    def __init__(self, config: EngineConfig, access: Access, *, is_for_operators: bool) -> None:
        self.settings = config.access
        self._access = access
        self._is_for_operators = is_for_operators
        self._bound = config.access.admin_host if is_for_operators else config.server.host
        # While a model loads, one application answers for both addresses.
        self._own_names = {config.server.host.lower(), config.access.admin_host.lower()}
        self._accepts = lru_cache(maxsize=256)(self._is_ours)

    @property
    def asks_keys(self) -> bool:
        """Whether a client must show a key for all that matters."""
        keys = self._access.keyring.keys
        return any(key.admin for key in keys) if self._is_for_operators else bool(keys)

    def check(self, request: web.Request) -> None:
        """Raises `ForeignHostError` for a name that is not this server's. A request without a name
        comes from no browser and passes.
        """
        given = request.headers.get(hdrs.HOST, "")
        if not given or self._accepts(given):
            return
        is_guarded = self.asks_keys or self._access.tls is not None or _is_by_unix_socket(request)
        if not is_guarded or self.settings.allowed_hosts:
            raise ForeignHostError(
                f"this server is not called {_name_of(given)[:64]!r}: use its address, or start it "
                "with --allowed-hosts and that name"
            )

    def _is_ours(self, given: str) -> bool:
        name = _name_of(given)
        if name in self._own_names or is_loopback(name) or _is_address(name):
            return True
        if self.settings.allowed_hosts:
            return any(_fits(name, allowed.lower()) for allowed in self.settings.allowed_hosts)
        # A server that listens beyond this machine is called by names of that network.
        return not is_loopback(self._bound) and (
            "." not in name or any(name.endswith(f".{local}") for local in LOCAL_NAMES)
        )


HOSTS = web.AppKey("HOSTS", Hosts)


def _is_by_unix_socket(request: web.Request) -> bool:
    link = request.transport
    return link is not None and isinstance(link.get_extra_info("sockname"), (str, bytes))


def _name_of(host: str) -> str:
    """Without the port, and without the brackets of an IPv6 address."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _fits(name: str, allowed: str) -> bool:
    if allowed.startswith("*."):
        return name.endswith(allowed[1:])
    return allowed in ("*", name)


# What clients on other machines could do without a key, of a server that is about to start.


logger = logging.getLogger(__name__)


def check_exposure(access: Access, doors: ListenSockets, *, has_admin: bool) -> None:
    """Warn of a server that answers other machines without keys. Raises `ConfigError` if these
    could operate it as well: `has_admin` says whether it has admin routes.
    """
    keys = access.keyring.keys
    asks_operators = any(key.admin for key in keys)
    operated = _far(doors.admin or doors.public) if has_admin and not asks_operators else None
    if operated is not None and not access.is_open_to_all:
        raise ConfigError(
            "the admin routes (server.enable_admin) would answer every client that reaches "
            f"{operated}: no key has 'admin: true'. Give one in access.api_keys_file, listen on "
            "127.0.0.1, move the routes to access.admin_port, or insist: --without-keys open"
        )
    asked = _far(doors.public)
    if asked is not None and not keys and access.settings.ssl_ca_certs is None:
        logger.warning(
            "%s serves every client that reaches it%s: there are no keys (--api-keys-file, "
            "AIOSERVE_API_KEYS)",
            asked,
            ", admin routes included" if operated is not None else "",
        )


def _far(sockets: Sequence[socket]) -> str | None:
    """Return the address of the first that other machines can reach."""
    for sock in sockets:
        if sock.family != AF_UNIX and not is_loopback(sock.getsockname()[0]):
            return url_of(sock)
    return None


# Which pages a browser lets ask this server: what it sends for a page without asking first is
# refused. What it asks first, and may read, is in `cors`.


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
    if not (is_own or is_allowed(request.app[HOSTS].settings, origin)):
        raise ForeignOriginError(
            f"{request.path} does not take requests of pages of {shortened(origin)}: it is neither "
            "this server nor one of access.allowed_origins"
        )


def is_allowed(settings: AccessConfig, origin: str | None) -> bool:
    """Return whether pages of this origin may ask."""
    return origin is not None and (
        "*" in settings.allowed_origins or origin in settings.allowed_origins
    )


def shortened(text: str | None) -> str:
    """Return what a client has sent as an error quotes it."""
    return repr(str(text)[:64])
