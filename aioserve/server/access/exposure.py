"""What other machines could reach of a server that is about to start, and do without a key."""

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
    could operate it as well: `has_admin` says whether it has operators' routes.
    """
    keys = access.keyring.keys
    asks_operators = any(key.admin for key in keys)
    operated = _far(doors.admin or doors.public) if has_admin and not asks_operators else None
    if operated is not None and not access.is_open_to_all:
        raise ConfigError(
            "operators' routes (server.enable_admin) would answer everyone who reaches "
            f"{operated}: there is no key with 'admin: true'. Give one by access.api_keys_file, "
            "listen on 127.0.0.1, have them on access.admin_port, or insist: --without-keys open"
        )
    asked = _far(doors.public)
    if asked is not None and not keys and access.settings.ssl_ca_certs is None:
        logger.warning(
            "%s serves everyone who reaches it%s: there are no keys (--api-keys-file, "
            "AIOSERVE_API_KEYS)",
            asked,
            ", operators' routes included" if operated is not None else "",
        )


def _far(sockets: Sequence[socket]) -> str | None:
    """The address of the first that other machines can reach."""
    for sock in sockets:
        if sock.family != AF_UNIX and not is_loopback(sock.getsockname()[0]):
            return url_of(sock)
    return None
