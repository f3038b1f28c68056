"""No key, no answer; with one, as much as it may: over HTTP, of every route."""

import asyncio
import logging

import aiohttp
import pytest
from msgspec.structs import replace

from aioserve.errors import ConfigError
from aioserve.scheduler import BaseScheduler
from aioserve.server.access.access import MainAccess
from aioserve.server.routes import admin_routes, all_routes
from tests.processes import PATIENCE
from tests.server.access.conftest import ADMIN, ANN, BEN, CARL, DORA
from tests.server.raw_client import IDLE, until
from tests.server.serving import SIMULATED

OPEN = {"/livez", "/health", "/ready", "/metrics"}
WRONG: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer sk-wrong"},
    {"Authorization": "Basic x"},
    {"x-api-key": "wrong"},
]


@pytest.fixture
async def locked(start_server, keys_file):
    settings = {"api_keys_file": str(keys_file)}
    async with start_server(access=settings, server={"enable_admin": True}) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(server, key, path="/v1/completions", headers=None, **body):
    if path == "/v1/completions":
        body = {"prompt": "Hello", "max_tokens": 2, **body}
    headers = bearer(key) | (headers or {})
    return await server.request("POST", path, json=body, headers=headers)


async def test_every_route_but_those_of_probes_needs_a_key(locked):
    for route in [*all_routes(), *admin_routes()]:
        path = route.documented_path.replace("{id}", "x")
        needs_key = path not in OPEN
        assert (route.needs != "nothing") == needs_key, path
        for headers in WRONG if path == "/v1/completions" else WRONG[:2]:
            answer = await locked.request(route.method, path, headers=headers)
            assert (answer.status == 401) == needs_key, answer
            if needs_key:
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                error = answer.json()["error"]
                if path.startswith("/v1/messages"):
                    assert error["type"] == "authentication_error"
                elif path.startswith("/api/"):
                    assert "API key" in error
                else:
                    assert error["code"] == "invalid_api_key"
        answer = await locked.request(route.method, path, headers=bearer(ANN))
        assert (answer.status == 403) == (route in admin_routes()), answer
        answer = await locked.request(route.method, path, headers=bearer(ADMIN))
        assert answer.status not in (401, 403), path


async def test_a_path_that_is_not_there_tells_nothing_without_a_key(locked):
    assert (await locked.get("/admin/secret")).status == 401
    assert (await locked.request("GET", "/x", headers=bearer(ANN))).status == 404


async def test_anthropics_clients_show_their_key_in_a_header_of_their_own(locked):
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
    for headers in ({"x-api-key": ANN}, bearer(ANN), {"x-api-key": ANN} | bearer("sk-wrong")):
        answer = await locked.request("POST", "/v1/messages", json=body, headers=headers)
        assert answer.status == 200, answer
    chat = {"messages": body["messages"], "max_tokens": 2}
    answer = await locked.request(
        "POST", "/v1/chat/completions", json=chat, headers={"x-api-key": ANN}
    )
    assert answer.status == 401


async def test_without_keys_nobody_is_asked_for_one(server):
    assert (await server.complete(max_tokens=1)).status == 200
    answer = await server.request("GET", "/v1/models", headers=bearer("sk-any"))
    assert answer.status == 200


async def test_metrics_can_be_kept_to_those_with_a_key(start_server, keys_file):
    settings = {"api_keys_file": str(keys_file), "protect_metrics": True}
    async with start_server(access=settings) as server:
        assert (await server.get("/metrics")).status == 401
        assert (await server.get("/health")).status == 200
        answer = await server.request("GET", "/metrics", headers=bearer(ANN))
        assert answer.status == 200


async def test_the_user_is_the_keys_name_unless_the_client_names_one(locked, monkeypatch):
    seen = []
    add_request = BaseScheduler.add_request

    def note(scheduler, request):
        seen.append((request.user, request.spec.key_name, request.priority))
        return add_request(scheduler, request)

    monkeypatch.setattr(BaseScheduler, "add_request", note)
    await ask(locked, ANN)
    await ask(locked, ANN, user="will", priority=-9)
    await ask(locked, CARL)
    await ask(locked, CARL, priority=7)
    assert seen == [
        ("ann", "ann", 0),
        ("will", "ann", -9),
        ("carl", "carl", 3),
        ("carl", "carl", 7),
    ]


async def test_a_priority_beyond_the_keys_is_refused_in_words(locked):
    answer = await ask(locked, CARL, priority=2)
    assert answer.status == 403
    error = answer.json()["error"]
    assert error["param"] == "priority"
    assert "priority 2 is more urgent than key 'carl' may ask for: 3 or larger" in error["message"]
    answer = await locked.request(
        "POST", "/v1/embeddings", json={"input": "x", "priority": 2}, headers=bearer(CARL)
    )
    assert answer.status == 403


async def test_a_key_gets_no_more_requests_at_once_than_it_may_and_others_do(locked):
    slow = asyncio.ensure_future(ask(locked, BEN, max_tokens=150, ignore_eos=True))
    await until(locked, lambda gauges: gauges["num_requests_running"] == 1)
    answer = await ask(locked, BEN)
    assert answer.status == 429
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert "key 'ben' has 1 requests running" in answer.json()["error"]["message"]
    assert int(answer.headers["Retry-After"]) >= 1
    body = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
    answer = await locked.request("POST", "/v1/messages", json=body, headers=bearer(BEN))
    assert (answer.status, answer.json()["error"]["type"]) == (429, "rate_limit_error")
    assert (await ask(locked, ANN)).status == 200
    assert (await slow).status == 200
    assert (await ask(locked, BEN)).status == 200


async def test_tokens_of_a_minute_are_counted_of_those_whose_client_leaves_as_well(locked):
    had = locked.engine.metrics.of_server.accounts.num_tokens
    asked = asyncio.ensure_future(ask(locked, BEN, max_tokens=4000, ignore_eos=True))
    await until(locked, lambda gauges: gauges["kv_cache_used_blocks"] > 2)  # of 16 tokens each
    asked.cancel()
    await until(locked, lambda gauges: gauges == IDLE)
    assert had["ben"] > 32
    assert had["ben"] < 195
    assert (await ask(locked, BEN)).status == 200  # what was held for the rest has come back
    left = 200 - had["ben"]
    answer = await ask(locked, BEN, max_tokens=left + 10)
    assert answer.status == 429
    assert "of its 200 tokens a minute left, and this request" in answer.json()["error"]["message"]
    assert 1 <= int(answer.headers["Retry-After"]) <= 12 * 60 / 200 + 1


async def test_one_body_has_no_more_sequences_and_tokens_than_its_key_may_have(locked):
    for fields in (
        {"prompt": [[7]] * 3},
        {"n": 2},
        {"best_of": 2},
        {"prompt": ["a", "b"], "n": 2, "stream": True},
    ):
        answer = await ask(locked, BEN, **fields)
        assert answer.status == 403, fields
        assert answer.json()["error"]["param"] == "n"
        assert "key 'ben' may have 1 requests running" in answer.json()["error"]["message"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": 3, "max_tokens": 4}
    answer = await ask(locked, BEN, "/v1/chat/completions", **body)
    assert answer.status == 403
    assert (await ask(locked, BEN)).status == 200
    assert (await ask(locked, BEN, "/v1/embeddings", input=["a", "b", "c"])).status == 200
    answer = await ask(locked, BEN, "/v1/embeddings", input=["a " * 300] * 2)
    assert (answer.status, answer.json()["error"]["param"]) == (403, "max_tokens")
    items = {"query": "Who?", "items": ["a " * 300] * 2, "label_token_ids": [5]}
    answer = await ask(locked, BEN, "/v1/score", **items)
    assert (answer.status, answer.json()["error"]["param"]) == (403, "max_tokens")


async def test_the_tokens_that_a_request_may_use_are_held_until_its_end(locked):
    async with aiohttp.ClientSession(headers=bearer(DORA)) as session:
        body = {"prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        async with session.post(f"{locked.url}/v1/completions", json=body) as stream:
            await stream.content.readline()  # it is longer than a minute's tokens, and has them all
            answer = await ask(locked, DORA, max_tokens=1000)  # half a minute of its tokens
            assert answer.status == 429
            assert "tokens a minute" in answer.json()["error"]["message"]
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
    answer = await ask(locked, DORA, prompt=["a", "b"], max_tokens=1500)
    assert (answer.status, answer.json()["error"]["param"]) == (403, "max_tokens")


async def test_one_key_does_not_fill_the_queue(start_server, keys_file):
    config = {"max_num_seqs": 1, "max_waiting_requests": 10}
    settings = {"api_keys_file": str(keys_file)}
    async with start_server(access=settings, scheduler=config) as server:
        long = {"max_tokens": 2000, "ignore_eos": True}
        first = asyncio.ensure_future(ask(server, ANN, **long))
        await until(server, lambda gauges: gauges["num_requests_running"] == 1)
        answer = await ask(server, ANN, n=6)
        assert answer.status == 429
        error = answer.json()["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert "6 more would be over its share of the queue (5, " in error["message"]
        assert int(answer.headers["Retry-After"]) >= 1
        most = asyncio.ensure_future(ask(server, ANN, n=5, **long))
        await until(server, lambda gauges: gauges["num_requests_waiting"] == 5)
        assert (await ask(server, ANN)).status == 429
        other = asyncio.ensure_future(ask(server, CARL))
        await until(server, lambda gauges: gauges["num_requests_waiting"] == 6)
        first.cancel()
        most.cancel()
        assert (await other).status == 200
        assert (await ask(server, ANN, n=5)).status == 200  # its share is free again


async def test_refusals_and_tokens_are_told_by_key_and_no_key_is_in_log_or_metrics(locked, caplog):
    with caplog.at_level(logging.DEBUG):
        await ask(locked, "sk-never-seen-0123456789")
        await ask(locked, ANN, max_tokens=0)
        await ask(locked, CARL, priority=-1)
        await ask(locked, ANN, max_tokens=3, ignore_eos=True)
        text = (await locked.get("/metrics")).body.decode()
    for line in (
        'aioserve_requests_refused_total{key="",reason="invalid_api_key"} 1.0',
        'aioserve_requests_refused_total{key="ann",reason="http_400"} 1.0',
        'aioserve_requests_refused_total{key="carl",reason="not_allowed"} 1.0',
        'aioserve_key_tokens_total{key="ben"} 0.0',
        'aioserve_key_requests_running{key="ben"} 0.0',
    ):
        assert line in text, text
    [count] = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith('aioserve_key_tokens_total{key="ann"}')
    ]
    assert count > 3  # the prompt and the output
    assert "of key carl: HTTP 403" in caplog.text
    for told in (caplog.text, text):
        assert "sk-" not in told


async def test_the_timeout_of_a_header_counts_if_it_is_the_smaller(server):
    async def asked(header, **fields):
        body = {"prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, **fields}
        answer = await server.request(
            "POST", "/v1/completions", json=body, headers={"X-Request-Timeout": header}
        )
        assert answer.status == 200, answer
        return answer.json()["choices"][0]["finish_reason"]

    assert await asked("0.05") == "timeout"
    assert await asked("600", timeout=0.05) == "timeout"
    assert await asked("0.05", timeout=600) == "timeout"
    assert await asked("600", max_tokens=2) == "length"
    for header in ("0", "-1", "soon", "nan", "inf", "1_0", ""):
        answer = await server.request(
            *("POST", "/v1/embeddings"),
            json={"input": "x"},
            headers={"X-Request-Timeout": header},
        )
        assert answer.status == 400
        assert answer.json()["error"]["param"] == "X-Request-Timeout"


async def test_keys_are_read_again_and_a_bad_file_changes_nothing(locked, keys_file):
    access = locked.engine.metrics.of_server
    text = keys_file.read_text()
    keys_file.write_text(text.replace(ANN, "sk-ann-rotated-0123"))
    access.reload()
    async with asyncio.timeout(PATIENCE):  # API workers hear of it a moment later
        while (await ask(locked, ANN)).status != 401:
            pass
    assert (await ask(locked, "sk-ann-rotated-0123")).status == 200
    keys_file.write_text("keys: []")
    with pytest.raises(ConfigError, match="has no key"):
        access.reload()
    assert (await ask(locked, "sk-ann-rotated-0123")).status == 200


def test_operators_routes_without_an_operators_key_are_refused_at_the_start(tmp_path):
    (tmp_path / "keys").write_text(ANN)
    config = replace(
        SIMULATED,
        access=replace(SIMULATED.access, api_keys_file=str(tmp_path / "keys")),
        server=replace(SIMULATED.server, enable_admin=True),
    )
    with pytest.raises(ConfigError, match=r"no key may use the admin .* 'admin: true'"):
        MainAccess(config)


async def test_the_document_says_which_routes_need_a_key(locked, server):
    answer = await locked.request("GET", "/openapi.json", headers=bearer(ANN))
    paths = answer.json()["paths"]
    assert paths["/v1/completions"]["post"]["security"] == [{"bearer": []}]
    assert {"x-api-key": []} in paths["/v1/messages"]["post"]["security"]
    assert "security" not in paths["/health"]["get"]
    document = (await server.get("/openapi.json")).json()
    assert "securitySchemes" not in document["components"]


async def test_what_a_key_has_asked_for_only_it_and_operators_can_see_and_end(locked):
    body = {"input": "Hello", "max_output_tokens": 2}
    answer = await locked.request("POST", "/v1/responses", json=body, headers=bearer(ANN))
    path = f"/v1/responses/{answer.json()['id']}"
    for key, status in ((CARL, 404), (ANN, 200), (ADMIN, 200)):
        for method, own in (("GET", path), ("GET", f"{path}/input_items")):
            assert (await locked.request(method, own, headers=bearer(key))).status == status
        body["previous_response_id"] = answer.json()["id"]
        again = await locked.request("POST", "/v1/responses", json=body, headers=bearer(key))
        assert (again.status == 200) == (status == 200)
    assert (await locked.request("DELETE", path, headers=bearer(CARL))).status == 404
    assert (await locked.request("DELETE", path, headers=bearer(ANN))).status == 200
    for key in (ANN, ADMIN):
        asked = asyncio.ensure_future(
            ask(locked, ANN, request_id="mine", prompt=["a", "b"], max_tokens=4000, ignore_eos=True)
        )
        await until(locked, lambda gauges: gauges["num_requests_running"] == 2)
        for given_id in ("mine", "mine-1"):
            answer = await ask(locked, CARL, "/v1/abort", request_id=given_id)
            assert answer.status == 404, answer
        for given_id in ("mine-1", "mine"):
            assert (await ask(locked, key, "/v1/abort", request_id=given_id)).status == 200
        assert {c["finish_reason"] for c in (await asked).json()["choices"]} == {"abort"}


async def test_an_id_that_anothers_prompt_has_cannot_be_taken_nor_ended_by_a_part_of_ones_own(
    locked,
):
    asked = asyncio.ensure_future(
        ask(locked, ANN, request_id="job-1", max_tokens=4000, ignore_eos=True)
    )
    await until(locked, lambda gauges: gauges["num_requests_running"] == 1)
    answer = await ask(locked, CARL, request_id="job", prompt=["a", "b"])
    assert (answer.status, "'job-1' is in use" in answer.json()["error"]["message"]) == (409, True)
    for given_id in ("job", "job-1"):
        assert (await ask(locked, CARL, "/v1/abort", request_id=given_id)).status == 404
    assert (await ask(locked, ANN, "/v1/abort", request_id="job-1")).status == 200
    assert (await asked).json()["choices"][0]["finish_reason"] == "abort"


async def test_with_a_cache_of_its_own_a_key_cannot_tell_what_others_have_asked(
    start_server, keys_file
):
    keys_file.write_text(
        keys_file.read_text().replace(f"key: {BEN}", f"key: {BEN}, cache_salt: ann")
    )
    access = {"api_keys_file": str(keys_file), "cache_per_key": True}
    async with start_server(access=access) as server:

        async def cached(key, **fields):
            answer = await ask(server, key, prompt=[7] * 100, **fields)
            assert answer.status == 200
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await cached(ANN) == 0
        assert await cached(ANN) == 96
        for salt in (None, "ann", "ann\0"):
            assert await cached(CARL, cache_salt=salt) == 0
        assert await cached(CARL) == 96
        assert await cached(ANN, cache_salt="x") == 0  # within a key, salts go on as before
        assert await cached(BEN) == 96  # its file says that it shares with ann


def test_a_cache_per_key_that_would_have_no_effect_is_refused(keys_file):
    access = replace(SIMULATED.access, cache_per_key=True)
    with pytest.raises(ConfigError, match="cache_per_key is on, which has no effect: there are no"):
        MainAccess(replace(SIMULATED, access=access))
    keys_file.write_text(keys_file.read_text().replace(f"key: {BEN}", f"key: {BEN}, cache_salt: x"))
    access = replace(SIMULATED.access, api_keys_file=str(keys_file))
    with pytest.raises(ConfigError, match="key 'ben' has a cache_salt, which has no effect"):
        MainAccess(replace(SIMULATED, access=access))
