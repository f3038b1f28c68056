"""Pages of other origins: what a browser asks before, and what it is told after."""

import pytest

from aioserve.config import AccessConfig
from aioserve.errors import ConfigError
from tests.server.access.conftest import ANN

PAGE = "https://chat.example:8443"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, Content-Type",
}


async def test_a_page_of_an_allowed_origin_may_ask_and_read_errors_as_well(start_server, keys_file):
    access = {"allowed_origins": (PAGE,), "api_keys_file": str(keys_file)}
    async with start_server(access=access) as server:
        answer = await server.request("OPTIONS", "/v1/completions", headers=PREFLIGHT)
        assert (answer.status, answer.body) == (204, b"")  # without a key: a browser sends none
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
        assert answer.headers["Access-Control-Allow-Methods"] == "POST"
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
        answer = await server.request("POST", "/v1/completions", headers={"Origin": PAGE})
        assert answer.status == 401
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
        assert "Retry-After" in answer.headers["Access-Control-Expose-Headers"]
        assert answer.headers["Vary"] == "Origin"
        assert "Access-Control-Allow-Credentials" not in answer.headers
        for origin in ({}, {"Origin": "https://evil.example"}):
            answer = await server.request("GET", "/health", headers=origin)
            assert answer.status == 200
            assert "Access-Control-Allow-Origin" not in answer.headers
        answer = await server.request(
            "OPTIONS", "/v1/completions", headers=PREFLIGHT | {"Origin": "https://evil.example"}
        )
        assert answer.status == 403
        assert "is not in access.allowed_origins" in answer.json()["error"]["message"]


async def test_pages_of_others_cannot_operate_a_server_through_an_operators_browser(start_server):
    """A browser asks nothing before a POST without a body."""
    settings = {"server": {"enable_admin": True}, "access": {"allowed_origins": (PAGE,)}}
    async with start_server(**settings) as server:
        own = server.url.replace("http:", "https:")  # a proxy's
        paths = ("/admin/pause", "/admin/resume", "/admin/reset_prefix_cache")
        for path in paths:
            for origin in ("https://evil.example", "null", f"{own}.evil.example"):
                answer = await server.request("POST", path, headers={"Origin": origin})
                assert answer.status == 403
                assert "does not take requests of pages" in answer.json()["error"]["message"]
            for origin in (own, server.url, PAGE):
                assert (
                    await server.request("POST", path, headers={"Origin": origin})
                ).status == 200
        assert (await server.request("POST", "/admin/resume")).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
async def test_pages_of_others_cannot_spend_this_machines_time(server, headers):
    """Without keys, nothing that a page must know stands between it and the model."""
    body = {"prompt": "Hello", "max_tokens": 2}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/abort"):
        answer = await server.request("POST", path, json=body, headers=headers)
        assert (answer.status, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    metrics = (await server.get("/metrics")).body.decode()
    assert "aioserve_prompt_tokens_total 0.0" in metrics
    assert 'refused_total{key="",reason="origin_not_allowed"} 4.0' in metrics
    assert (await server.request("GET", "/v1/models", headers=headers)).status == 200
    assert (await server.complete(max_tokens=1)).status == 200


async def test_the_servers_own_page_may_ask_whatever_a_proxy_calls_the_server(server):
    body = {"prompt": "Hello", "max_tokens": 2}
    for headers in (
        {"Origin": server.url},
        {"Origin": "https://chat.example", "Sec-Fetch-Site": "same-origin"},
        {"Sec-Fetch-Site": "none"},
    ):
        answer = await server.request("POST", "/v1/completions", json=body, headers=headers)
        assert answer.status == 200, headers


async def test_a_page_that_shows_a_key_is_no_stranger(start_server, keys_file):
    async with start_server(access={"api_keys_file": str(keys_file)}) as server:
        answer = await server.request(
            *("POST", "/v1/completions"),
            json={"prompt": "Hello", "max_tokens": 2},
            headers={"Origin": "app://desktop", "Authorization": f"Bearer {ANN}"},
        )
        assert answer.status == 200


async def test_a_stream_tells_its_origin_with_its_first_bytes(start_server):
    async with start_server(access={"allowed_origins": ("*",)}) as server:
        body = {"prompt": "Hello", "max_tokens": 2, "stream": True}
        answer = await server.request(
            "POST", "/v1/completions", json=body, headers={"Origin": "null"}
        )
        assert answer.headers["Access-Control-Allow-Origin"] == "null"
        assert answer.events()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"allowed_methods": ("GET",)}, "'POST' is not"), ({"allowed_headers": ("x-a",)}, "header")],
)
async def test_methods_and_headers_can_be_fewer(start_server, settings, message):
    async with start_server(access={"allowed_origins": (PAGE,), **settings}) as server:
        answer = await server.request("OPTIONS", "/v1/completions", headers=PREFLIGHT)
        assert answer.status == 403
        assert message in answer.json()["error"]["message"]


async def test_without_allowed_origins_nothing_of_this_is_said(server):
    answer = await server.request("OPTIONS", "/v1/completions", headers=PREFLIGHT)
    assert answer.status == 405
    assert "Vary" not in answer.headers


@pytest.mark.parametrize("origin", ['["*"]', "chat.example", "https://a/b", "https://a, https://b"])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ConfigError, match=r"is no origin: .* one a flag"):
        AccessConfig(allowed_origins=(origin,))
    with pytest.raises(ConfigError, match="allow_credentials needs origins by name"):
        AccessConfig(allowed_origins=("*",), allow_credentials=True)
