"""What clients on other machines could do without a key, of a server that is about to start."""

import logging
from collections.abc import Sequence
from socket import AF_UNIX, socket

from aioserve.errors import ConfigError
from aioserve.server.access.access import Access
from aioserve.server.access.hosts import is_loopback
from aioserve.server.sockets import ListenSockets, url_of

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
    """The address of the first that other machines can reach."""
    for sock in sockets:
        if sock.family != AF_UNIX and not is_loopback(sock.getsockname()[0]):
            return url_of(sock)
    return None
