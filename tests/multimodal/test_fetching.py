"""Images by URL, from a real host on a real socket. Only the rule of who is public is another one:
nothing in a test's network is.
"""

import asyncio
import ipaddress
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from aioserve.errors import RequestError
from aioserve.features.multimodal import fetching
from aioserve.features.multimodal.fetching import MAX_REDIRECTS, ImageFetcher, is_public

IMAGE = b"bytes of an image"


@pytest.fixture
async def host(monkeypatch) -> AsyncIterator[str]:
    """A host at 127.0.0.1, which alone counts as public."""
    monkeypatch.setattr(fetching, "is_public", lambda ip: ip == ipaddress.ip_address("127.0.0.1"))
    app = web.Application()

    async def image(request: web.Request) -> web.Response:
        kind = request.query.get("type", "image/png")
        return web.Response(body=IMAGE, headers={"Content-Type": kind})

    async def status(request: web.Request) -> web.Response:
        return web.Response(status=int(request.match_info["status"]))

    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        await response.prepare(request)
        while True:
            await response.write(bytes(10_000))

    async def stalled(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "image/png"})
        await response.prepare(request)
        await asyncio.sleep(3600)
        return response

    async def large(request: web.Request) -> web.Response:
        return web.Response(body=bytes(100_001), headers={"Content-Type": "image/png"})

    async def zipped(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        headers = {"Content-Type": "image/png", "Content-Encoding": "gzip"}
        return web.Response(body=b"", headers=headers)

    async def redirect(request: web.Request) -> web.Response:
        raise web.HTTPFound(request.query["to"])

    async def again(request: web.Request) -> web.Response:
        left = int(request.match_info["left"])
        raise web.HTTPTemporaryRedirect(f"/again/{left - 1}" if left > 1 else "/image")

    app.router.add_get("/image", image)
    app.router.add_get("/status/{status}", status)
    app.router.add_get("/endless", endless)
    app.router.add_get("/stalled", stalled)
    app.router.add_get("/large", large)
    app.router.add_get("/zipped", zipped)
    app.router.add_get("/redirect", redirect)
    app.router.add_get("/again/{left}", again)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", 0)
    await site.start()
    yield f"127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def fetcher() -> AsyncIterator[ImageFetcher]:
    fetcher = ImageFetcher()
    yield fetcher
    await fetcher.close()


async def fetch(fetcher: ImageFetcher, url: str, seconds: float = 60.0) -> bytes:
    taken = 0

    def take(count: int) -> None:
        nonlocal taken
        taken += count
        if taken > 100_000:
            raise RequestError("more than 100,000 bytes")

    return await fetcher.fetch(url, take, seconds)


@pytest.mark.parametrize("kind", ["image/png", "IMAGE/JPEG; x=y", "application/octet-stream"])
async def test_what_a_host_calls_an_image_is_fetched(fetcher, host, kind):
    assert await fetch(fetcher, f"http://{host}/image?type={kind}") == IMAGE


async def test_redirects_are_followed_so_far(fetcher, host):
    assert await fetch(fetcher, f"http://{host}/again/{MAX_REDIRECTS}") == IMAGE
    with pytest.raises(RequestError, match=f"more than {MAX_REDIRECTS} redirects"):
        await fetch(fetcher, f"http://{host}/again/{MAX_REDIRECTS + 1}")


@pytest.mark.parametrize(
    "name",
    [
        "127.0.0.2",
        "0x7f.2",  # 127.0.0.2
        "[::1]",
        "[::ffff:127.0.0.2]",
        "[64:ff9b::7f00:2]",
        "localhost.localdomain.invalid",
    ],
)
async def test_only_public_addresses_are_connected_to(fetcher, host, name):
    port = host.partition(":")[2]
    for url in (f"http://{name}:{port}/image", f"http://{host}/redirect?to=http://{name}:{port}/"):
        with pytest.raises(RequestError, match="cannot be reached at a public address"):
            await fetch(fetcher, url)


async def test_an_address_that_only_looks_different_is_the_same(fetcher, host):
    port = host.partition(":")[2]
    assert await fetch(fetcher, f"http://0x7f.1:{port}/image") == IMAGE  # 127.0.0.1
    for name in ("2130706433", "0177.0.0.1"):
        with pytest.raises(RequestError, match="not a canonical IPv4 address"):
            await fetch(fetcher, f"http://{name}:{port}/image")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("status/404", "answers with status 404"),
        ("status/304", "answers with status 304"),
        ("image?type=text/html", "sends no image, but 'text/html'"),
        ("endless", "more than 100,000 bytes"),
        ("large", "more than 100,000 bytes"),
        ("zipped", "compressed once more"),
        ("redirect?to=file:///etc/passwd", "redirects: URLs of 'file' are not fetched"),
        ("redirect?to=http://a:b@127.0.0.1/", "redirects: the URL has a user name"),
    ],
)
async def test_what_a_host_may_not_answer(fetcher, host, path, message):
    with pytest.raises(RequestError, match=message):
        await fetch(fetcher, f"http://{host}/{path}")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://127.0.0.1/image", "URLs of 'ftp' are not fetched"),
        ("//127.0.0.1/image", "URLs of '' are not fetched"),
        ("http:///image", "names no host"),
        ("http://user@127.0.0.1/", "user name"),
        ("http://:word@127.0.0.1/", "user name"),
        ("http://127.0.0.1:99999/", "no URL"),
        ("http://[::1/", "no URL"),
        ("http://127.0.0.1/" + "a" * 5000, "5017 characters"),
    ],
)
async def test_what_a_url_may_not_be(fetcher, url, message):
    with pytest.raises(RequestError, match=message):
        await fetch(fetcher, url)


async def test_a_host_that_says_nothing_has_its_time(fetcher, host):
    before = time.monotonic()
    with pytest.raises(RequestError, match=r"did not come within 0\.05 s"):
        await fetch(fetcher, f"http://{host}/stalled", seconds=0.05)
    assert time.monotonic() - before < 3000  # and not as long as the host would take


async def test_nobody_listens_there(fetcher, host, unused_tcp_port):
    with pytest.raises(RequestError, match=r"'127\.0\.0\.1' cannot be reached"):
        await fetch(fetcher, f"http://127.0.0.1:{unused_tcp_port}/")


@pytest.mark.parametrize("domain", ["Pictures.example", ".pictures.example."])
async def test_a_list_of_domains_admits_them_and_what_is_below(host, domain):
    fetcher = ImageFetcher([domain])
    for name in ("other.example", "mypictures.example", "127.0.0.1"):
        with pytest.raises(RequestError, match=r"only those of pictures\.example"):
            await fetch(fetcher, f"http://{name}/image")
    for name in ("pictures.example", "a.b.pictures.EXAMPLE", "pictures.example."):
        assert fetcher._checked(f"http://{name}/image")
    await fetcher.close()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("64:ff9b::5db8:d822", True),  # the first of these, by NAT64
        ("::ffff:93.184.216.34", True),
        *(
            (address, False)
            for address in (
                *("0.0.0.0", "10.0.0.1", "100.64.0.1", "127.0.0.1", "169.254.169.254"),
                *("172.16.0.1", "192.168.1.1", "192.0.2.1", "198.18.0.1", "224.0.0.1"),
                *("240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1", "fe80::1"),
                *("fe80::1%1", "fc00::1", "fec0::1", "ff02::1", "2001:db8::1"),
                *("::ffff:10.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::a00:1", "2002:a00:1::"),
                *("2001:0:5db8:d822::1", "100::1"),
            )
        ),
    ],
)
def test_which_addresses_are_public(address, public):
    assert is_public(ipaddress.ip_address(address)) == public
