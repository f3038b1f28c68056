"""By which names a server may be called: a page's own name, made to point here, is none of them."""

import aiohttp
import msgspec
import pytest

from aioserve.config import AccessConfig, EngineConfig, ServerConfig
from aioserve.errors import ConfigError
from aioserve.server.access.access import Access
from aioserve.server.access.accounts import Accounts
from aioserve.server.access.keys import Rights
from aioserve.server.access.origins import Hosts
from aioserve.server.loading import answering_while_loading
from aioserve.server.sockets import bind
from tests.server.access.conftest import ADMIN, ANN
from tests.server.access.test_doors import serving
from tests.server.serving import SIMULATED

EVIL = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}  # of one origin
BODY = {"prompt": "Hello", "max_tokens": 2}


async def ask(url: str, path: str, headers: dict[str, str], body: object = None, **options: object):
    """The status, and the code of the error if it is one."""
    method = "GET" if body is None else "POST"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url + path, headers=headers, json=body, **options) as response,
    ):
        if response.status < 400:
            return response.status, None
        return response.status, (await response.json())["error"]["code"]


async def test_a_page_whose_name_was_made_to_point_here_reaches_no_route(start_server):
    async with start_server(server={"enable_admin": True}) as server:
        for path, body in (
            ("/v1/completions", BODY),
            ("/admin/policy", {"policy": "fcfs"}),
            ("/v1/models", None),
            ("/watch/steps", None),
            ("/", None),
        ):
            assert await ask(server.url, path, EVIL, body) == (403, "host_not_allowed"), path
        assert server.engine.config.scheduler.policy == "chunked_prefill"
        for name in ("localhost", "127.0.0.1:8000", "[::1]:9", "api.localhost", "LOCALHOST.", ""):
            assert await ask(server.url, "/v1/completions", {"Host": name}, BODY) == (200, None)


@pytest.mark.parametrize(
    ("bound", "allowed", "yes", "no"),
    [
        ("127.0.0.1", (), ["localhost", "10.1.2.3", "[fe80::1]"], ["box", "box.local", "a.com"]),
        ("localhost", (), ["127.0.0.2"], ["localhost.evil.com", "127.0.0.1.evil.com"]),
        ("0.0.0.0", (), ["box", "aioserve", "box.local", "a.svc.cluster.local"], ["box.com"]),
        ("box.example.com", (), ["box.example.com", "box"], ["evil.example.com"]),
        ("0.0.0.0", ("chat.example",), ["chat.example", "10.1.2.3", "localhost"], ["box"]),
        (
            "127.0.0.1",
            ("*.b.example",),
            ["a.b.example", "c.a.b.example"],
            ["b.example", "ab.example"],
        ),
        ("127.0.0.1", ("*",), ["evil.example"], []),
    ],
    ids=str,
)
async def test_which_names_are_ours(bound, allowed, yes, no):
    config = EngineConfig(
        server=ServerConfig(host=bound), access=AccessConfig(allowed_hosts=allowed)
    )
    access = Access(config.access, [], Accounts(lambda name: Rights()))
    hosts = Hosts(config, access, is_for_operators=False)
    sockets = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    async with answering_while_loading(sockets, shares_port=False, hosts=hosts):
        for names, expected in ((yes, (200, None)), (no, (403, "host_not_allowed"))):
            for name in names:
                for host in (name, f"{name}:8000"):
                    assert await ask(url, "/livez", {"Host": host}) == expected, host
    for sock in sockets:
        sock.close()


async def test_a_server_with_keys_answers_to_every_name_unless_some_are_set(
    start_server, keys_file
):
    settings = {"api_keys_file": str(keys_file)}
    headers = {"Host": "chat.example", "Authorization": f"Bearer {ANN}"}
    for allowed, expected in (((), (200, None)), (("a.example",), (403, "host_not_allowed"))):
        async with start_server(access={**settings, "allowed_hosts": allowed}) as server:
            assert await ask(server.url, "/v1/completions", headers, BODY) == expected


async def test_a_port_of_operators_without_their_key_is_as_strict_as_a_server_without_keys(
    keys_file,
):
    for has_operator in (True, False):
        if not has_operator:
            keys_file.write_text(keys_file.read_text().replace(", admin: true", ""))
        settings = {"enable_admin": True, "admin_port": 0, "api_keys_file": str(keys_file)}
        async with serving(**settings) as (url, doors, _):
            own = f"http://127.0.0.1:{doors.admin[0].getsockname()[1]}"
            headers = {**EVIL, "Authorization": f"Bearer {ADMIN}"}
            expected = (200, None) if has_operator else (403, "host_not_allowed")
            assert await ask(own, "/metrics", headers) == expected
            assert await ask(url, "/v1/models", headers) == (200, None)


async def test_who_comes_by_a_unix_socket_may_say_any_name(tmp_path):
    async with serving(uds=str(tmp_path / "a.sock")):
        connector = aiohttp.UnixConnector(path=str(tmp_path / "a.sock"))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get("http://chat.example/v1/models") as response,
        ):
            assert response.status == 200


async def test_while_the_model_is_loaded_the_same_names_and_origins_hold():
    access = Access(SIMULATED.access, [], Accounts(lambda name: Rights()))
    hosts = Hosts(SIMULATED, access, is_for_operators=False)
    sockets = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    async with answering_while_loading(sockets, shares_port=False, hosts=hosts):
        assert await ask(url, "/ready", EVIL) == (403, "host_not_allowed")
        foreign = {"Origin": "https://evil.example"}
        assert await ask(url, "/v1/completions", foreign, BODY) == (403, "origin_not_allowed")
        assert await ask(url, "/v1/completions", {}, BODY) == (503, "engine_unavailable")
    for sock in sockets:
        sock.close()


@pytest.mark.parametrize(
    "kind",
    ["application/x-www-form-urlencoded", "text/plain;charset=UTF-8", "multipart/form-data", None],
)
async def test_a_body_that_a_browser_sends_unasked_is_refused_in_words(server, kind):
    data = aiohttp.BytesPayload(msgspec.json.encode(BODY), content_type=kind)
    skipped = ["Content-Type"] if kind is None else []
    async with server.session.post(
        f"{server.url}/v1/completions", data=data, skip_auto_headers=skipped
    ) as response:
        assert response.status == 415
        message = (await response.json())["error"]["message"]
    assert f"application/json, got {kind!r}" in message or kind is None
    assert "-H 'Content-Type: application/json'" in message


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/vnd.a+json"])
async def test_json_may_be_called_by_its_other_names(server, kind):
    answer = await server.request(
        *("POST", "/v1/completions"),
        data=msgspec.json.encode(BODY),
        headers={"Content-Type": kind},
    )
    assert answer.status == 200


@pytest.mark.parametrize("name", ["https://a.example", "a.example:80", "*a.example", "a.*", ""])
def test_a_host_that_is_no_name_is_refused_in_words(name):
    with pytest.raises(ConfigError, match="allowed_hosts"):
        AccessConfig(allowed_hosts=(name,))
