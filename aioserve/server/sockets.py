"""The addresses that the server listens on, taken before the model is loaded.

A port in use should be said in milliseconds, not after minutes of reading weights.
"""

import contextlib
import errno
import os
import socket
import stat
from typing import Any, NamedTuple

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError


class ListenSockets(NamedTuple):
    """The bound sockets of a server, before it listens on them."""

    public: list[socket.socket]
    admin: list[socket.socket]  # for the admin routes, if those are not with the others
    path: str | None = None  # of a Unix socket that goes with them

    @property
    def all(self) -> list[socket.socket]:
        """The public sockets and the admin ones."""
        return [*self.public, *self.admin]

    def close(self) -> None:
        """Close the sockets and delete the Unix socket's file: no client can connect any more."""
        for sock in self.all:
            sock.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def open_doors(config: EngineConfig) -> ListenSockets:
    """Return what the settings say. Raises `ConfigError` as `bind` does."""
    access, server = config.access, config.server
    public = bind(server.host, server.port) if access.uds is None else [bind_unix(access.uds)]
    doors = ListenSockets(public, [], access.uds)
    if access.admin_port is not None:
        try:
            doors.admin.extend(bind(access.admin_host, access.admin_port))
        except BaseException:
            doors.close()
            raise
    return doors


def bind_unix(path: str) -> socket.socket:
    """Return a bound socket at `path`, not yet listening; what a dead server left there makes room.

    Raises `ConfigError` if something else is there, or a server that lives.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise ConfigError(f"cannot listen on {path}: it exists and is not a socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                if probe.connect_ex(path) != errno.ECONNREFUSED:
                    raise ConfigError(f"cannot listen on {path}: another server listens there")
            os.unlink(path)
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise cannot_listen(path, error) from error
    except BaseException:
        sock.close()
        raise
    return sock


def url_of(sock: socket.socket, *, is_encrypted: bool = False) -> str:
    """Return where what listens on it can be reached."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    scheme = "https" if is_encrypted else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


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
        raise cannot_listen(f"{host}:{port}", failure) from failure
    return sockets


def bind_beside(sock: socket.socket) -> socket.socket:
    """Return another socket for the address of a bound one: connections are spread over those that
    listen. Of a Unix socket it is the same once more: the process that is free first takes a
    connection.

    Other users' processes cannot take the address. Raises `OSError`.
    """
    if sock.family == socket.AF_UNIX:
        return share(sock)
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


def share(sock: socket.socket) -> socket.socket:
    """Return the same socket, and its queue of connections, once more. Raises `OSError`."""
    # `sock.dup` would set the mode of `sock`, which both share: a process that listens on it
    # already would stand still in its next accept.
    return socket.socket(fileno=os.dup(sock.fileno()))


def cannot_listen(where: str, error: OSError) -> ConfigError:
    """Return the one line that says why there is no server."""
    return ConfigError(f"cannot listen on {where}: {error.strerror or error}")


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
        raise cannot_listen(f"{host}:{port}", error) from error
    except UnicodeError as error:  # not even the shape of a host name
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
    return sorted({(int(family), address) for family, _, _, _, address in found})  # IPv4 first
