"""By which names clients may call the server: those that no page of the web can have.

A page may let its own name point to this machine after a browser has loaded it (DNS rebinding).
Then the browser takes the server for that page's own origin, and only the name tells them apart.
"""

import ipaddress
from functools import lru_cache

from aiohttp import web

from aioserve.config import EngineConfig
from aioserve.server.access.access import Access
from aioserve.server.errors import ForeignHostError

#: Names below these belong to a local network: a registrar sells none of them.
LOCAL_NAMES = ("local", "internal", "home.arpa", "localhost")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on `host`, a name or an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_near(request: web.Request) -> bool:
    """Whether the request comes from this machine, not by a proxy that names another client."""
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
        given = request.headers.get("Host", "")
        is_guarded = self.asks_keys or self._access.tls is not None or _is_by_unix_socket(request)
        if not given or (is_guarded and not self.settings.allowed_hosts):
            return
        name = _name_of(given).lower().removesuffix(".")
        if not self._accepts(name):
            raise ForeignHostError(
                f"this server is not called {name[:64]!r}: use its address, or start it with "
                "--allowed-hosts and that name"
            )

    def _is_ours(self, name: str) -> bool:
        if name in self._own_names or is_loopback(name) or _is_address(name):
            return True
        if self.settings.allowed_hosts:
            return any(_fits(name, allowed.lower()) for allowed in self.settings.allowed_hosts)
        # A server that listens beyond this machine is called by names of that network.
        return not is_loopback(self._bound) and (
            "." not in name or any(name.endswith(f".{local}") for local in LOCAL_NAMES)
        )


def _is_by_unix_socket(request: web.Request) -> bool:
    link = request.transport
    return link is not None and isinstance(link.get_extra_info("sockname"), str | bytes)


def _name_of(host: str) -> str:
    """Without the port, and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


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
