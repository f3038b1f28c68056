"""The addresses that the server listens on, taken before the model is loaded.

A port in use should be said in milliseconds, not after minutes of reading weights.
"""

import errno
import socket
from typing import Any

from aioserve.errors import ConfigError


def bind(host: str, port: int) -> list[socket.socket]:
    """Bound sockets, not yet listening, for the addresses of `host`; port 0 is any free one.

    Raises `ConfigError` if the host is unknown or the port is taken.
    """
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, address in _resolve(host, port):
        if port == 0 and sockets:  # all addresses share the port that the first one got
            address = (address[0], sockets[0].getsockname()[1], *address[2:])
        try:
            sockets.append(_bind_one(family, address))
        except OSError as error:
            failure = error
            if error.errno == errno.EADDRINUSE:
                break
    # "localhost" names ::1 even where IPv6 is switched off: one address is enough.
    if failure is not None and (not sockets or failure.errno == errno.EADDRINUSE):
        for sock in sockets:
            sock.close()
        raise cannot_listen(host, port, failure) from failure
    return sockets


def bind_beside(sock: socket.socket) -> socket.socket:
    """Another socket for the address of a bound one: connections are spread over those that listen.

    Nobody who did not ask for it can take the address. Raises `OSError`.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    other = socket.socket(sock.family, socket.SOCK_STREAM)
    try:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        other.bind(sock.getsockname())
    except OSError:
        other.close()
        raise
    return other


def cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    """The one line that says why there is no server."""
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}")


def _bind_one(family: int, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def _resolve(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    except UnicodeError as error:  # not even the shape of a host name
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return sorted({(int(family), address) for family, _, _, _, address in found})  # IPv4 first
