"""Images by URL: only from public addresses, within limits of bytes, time and redirects.

The address that is checked is the one that is connected to, so no name that changes its mind, no
redirect and no spelling of an address leads elsewhere. Knows nothing about images but their bytes.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from yarl import URL

from aioserve.errors import RequestError
from aioserve.support import __version__

MAX_REDIRECTS = 3
MAX_URL = 4096  # characters
# Connections: a request that wants more waits, within its time, so that no request may take them
# all, nor any one host.
_AT_ONCE, _AT_ONE_HOST = 64, 16
AT_ONCE_FOR_REQUEST = 4
_PIECE = 2**16  # bytes
# Storage often does not say what it holds; the bytes do.
_UNTYPED = ("application/octet-stream", "binary/octet-stream")
_REDIRECTS = (301, 302, 303, 307, 308)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # the last four bytes are an IPv4 address
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")


class ImageFetcher:
    """A fetcher of images for one event loop, to be closed at its end."""

    def __init__(self, domains: Sequence[str] = ()) -> None:
        """`domains`: only from these and their subdomains; from any if there are none."""
        self._domains = tuple(domain.lower().strip(".") for domain in domains)
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, url: str, take_bytes: Callable[[int], None], seconds: float) -> bytes:
        """Return what is there. `take_bytes` is told of bytes as they come, and raises if they are
        too many. Raises `RequestError` that says why there is nothing to be had.
        """
        try:
            async with asyncio.timeout(seconds):
                return await self._follow(url, take_bytes)
        except TimeoutError as error:
            raise RequestError(f"the image did not come within {seconds:g} s") from error

    async def close(self) -> None:
        """Close the HTTP client; no image is fetched any more."""
        if self._session is not None:
            await self._session.close()

    async def _follow(self, given: str, take_bytes: Callable[[int], None]) -> bytes:
        if len(given) > MAX_URL:
            raise RequestError(f"the URL has {len(given)} characters, more than {MAX_URL}")
        url = self._checked(given)
        for _ in range(MAX_REDIRECTS + 1):
            try:
                async with self._get(url) as response:
                    if response.status not in _REDIRECTS:
                        return await _read(response, take_bytes)
                    target = response.headers.get("Location", "")
            except aiohttp.ClientConnectorError as error:
                # One sentence for host names that do not exist and for those of this network.
                raise RequestError(
                    f"{_host(url)!r} cannot be reached at a public address"
                ) from error
            except aiohttp.InvalidURL as error:  # 2130706433, 0177.0.0.1
                raise RequestError(f"this is no URL: {error}"[:200]) from error
            except (aiohttp.ClientError, OSError, ValueError) as error:
                what = type(error).__name__
                raise RequestError(
                    f"{_host(url)!r} does not answer as it should: {what}"
                ) from error
            url = self._checked(target, base=url)
        raise RequestError(f"the URL leads to more than {MAX_REDIRECTS} redirects")

    def _checked(self, given: str, base: URL | None = None) -> URL:
        try:
            url = URL(given) if base is None else base.join(URL(given))
            host = _host(url)
        except ValueError as error:
            raise RequestError(f"this is no URL: {error}"[:200]) from error
        if url.scheme not in ("http", "https"):
            raise RequestError(f"{_from(base)}URLs of {url.scheme[:32]!r} are not fetched")
        if not host:
            raise RequestError(f"{_from(base)}the URL names no host")
        if url.user is not None or url.password is not None:
            raise RequestError(f"{_from(base)}the URL has a user name: none is sent")
        if self._domains and not any(
            host == domain or host.endswith(f".{domain}") for domain in self._domains
        ):
            raise RequestError(
                f"{_from(base)}images of {host!r} are not fetched here, only those of "
                f"{', '.join(self._domains)}"
            )
        return url

    def _get(self, url: URL) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=_AT_ONCE,
                    limit_per_host=_AT_ONE_HOST,
                    force_close=True,
                    socket_factory=_public_socket,
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),  # `fetch` has one for all
                headers={
                    "User-Agent": f"aioserve/{__version__}",
                    "Accept": "image/*",
                    "Accept-Encoding": "identity",
                },
            )
        return self._session.get(url, allow_redirects=False)


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether it is one of the Internet's: not private, loopback, link-local, multicast,
    reserved, nor of IPv6 with such an IPv4 address inside.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address in _LOCAL_NAT64 or address.teredo is not None or address.is_site_local:
            return False
    return address.is_global and not (
        address.is_multicast
        or address.is_reserved
        or address.is_loopback
        or address.is_link_local
        or address.is_unspecified
    )


def _public_socket(info: Any) -> socket.socket:
    """Return a socket for an address as getaddrinfo tells it, which is connected to next."""
    family, kind, protocol, _, (host, *_) = info
    if not is_public(ipaddress.ip_address(host)):
        raise PermissionError(f"{host} is no public address")
    return socket.socket(family, kind, protocol)


async def _read(response: aiohttp.ClientResponse, take_bytes: Callable[[int], None]) -> bytes:
    host = _host(response.url)
    if response.status != 200:
        raise RequestError(f"{host!r} answers with status {response.status}")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise RequestError(f"{host!r} sends the image compressed once more")
    kind = response.headers.get("Content-Type", _UNTYPED[0]).partition(";")[0].strip().lower()
    if not kind.startswith("image/") and kind not in _UNTYPED:
        raise RequestError(f"{host!r} sends no image, but {kind[:64]!r}")
    pieces = []
    async for piece in response.content.iter_chunked(_PIECE):
        take_bytes(len(piece))
        pieces.append(piece)
    return b"".join(pieces)


def _host(url: URL) -> str:
    return (url.raw_host or "").lower().rstrip(".")


def _from(base: URL | None) -> str:
    return "" if base is None else f"{_host(base)!r} redirects: "
