"""What one who looks on learns of others' requests opens and ends none of them."""

import asyncio
import json
import socket

import aiohttp
import psutil
import pytest

from aioserve.engine import AsyncEngine
from aioserve.engine.live_feed import shown_id
from aioserve.server.access.origins import is_loopback
from aioserve.server.app import listening
from aioserve.server.sockets import bind
from tests.processes import PATIENCE
from tests.server.page.test_steps_stream import frames_of
from tests.server.raw_client import until
from tests.server.serving import SIMULATED

ENDLESS = {"max_output_tokens": 4000, "ignore_eos": True}


async def test_what_a_looker_sees_neither_reads_nor_ends_nor_goes_on_with_a_response(server):
    async with server.session.get(f"{server.url}/watch/steps") as looking:
        frames = frames_of(looking)
        await anext(frames)
        body = {"input": "Hello", "max_output_tokens": 2000, "stream": True}
        async with server.session.post(f"{server.url}/v1/responses", json=body) as asking:
            assert asking.status == 200
            while not (came := (await anext(frames))["events"]["came"]):
                pass
            [seen] = [row[1] for row in came]
            created = json.loads((await asking.content.readuntil(b"\n\n")).split(b"data: ")[1])
            own_id = created["response"]["id"]
            assert seen == shown_id(own_id) == own_id[:13]  # enough for the operator's log
            answer = await server.request("POST", "/v1/abort", json={"request_id": seen})
            assert answer.status == 404
            await asking.read()  # its client has the stream to its end
        for method in ("GET", "DELETE"):
            answer = await server.request(method, f"/v1/responses/{seen}")
            assert answer.status == 404
        body = {"input": "Go on", "max_output_tokens": 2, "previous_response_id": seen}
        assert (await server.request("POST", "/v1/responses", json=body)).status == 400
        assert (await server.get(f"/v1/responses/{own_id}")).status == 200


async def test_no_frame_holds_the_id_that_a_client_chose(server):
    async with server.session.get(f"{server.url}/watch/steps") as looking:
        asked = [server.complete(max_tokens=3, request_id=f"ann-{i}") for i in range(3)]
        waiting, told = asyncio.gather(*asked), b""
        async with asyncio.timeout(PATIENCE):
            while told.count(b'"length"') < 3:
                told += await looking.content.readuntil(b"\n\n")
        await waiting
    assert b"ann-" not in told
    assert all(shown_id(f"ann-{i}").encode() in told for i in range(3))


async def test_an_operator_ends_a_request_by_the_id_that_its_client_knows(server):
    asked = asyncio.create_task(
        server.complete(max_tokens=4000, ignore_eos=True, request_id="mine")
    )
    await until(server, lambda gauges: gauges["num_requests_running"] == 1)
    answer = await server.request("POST", "/v1/abort", json={"request_id": shown_id("mine")})
    assert answer.status == 404
    assert (await server.request("POST", "/v1/abort", json={"request_id": "mine"})).status == 200
    assert (await asked).json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("request_id", "shown"),
    [
        ("resp_" + "0123456789abcdef" * 2, "resp_01234567"),
        ("cmpl-" + "0123456789abcdef" * 2 + "-3-1", "cmpl-01234567-3-1"),
        ("cmpl-" + "0123456789abcdef" * 2 + "-mine", None),
        ("secret-" + "0123456789abcdef" * 2, None),
        ("cmpl-0123", None),
        ("1", None),
    ],
)
def test_ids_of_128_random_bits_keep_32_and_others_none(request_id, shown):
    if shown is None:
        assert shown_id(request_id).startswith("own-")
        assert shown_id(request_id) == shown_id(request_id) != shown_id(request_id + "1")
    else:
        assert shown_id(request_id) == shown


def headed(name):
    return {name: "203.0.113.9"}


@pytest.mark.parametrize("name", ["Forwarded", "X-Forwarded-For", "X-Real-IP"])
async def test_without_keys_the_stream_is_for_this_machine_alone(start_server, name):
    """A proxy of this machine asks for somebody else, and says so."""
    for without_keys, status in (("local", 403), ("open", 200)):
        async with start_server(access={"without_keys": without_keys}) as server:
            assert (await server.request("HEAD", "/watch/steps")).status == 200
            answer = await server.request("HEAD", "/watch/steps", headers=headed(name))
            assert answer.status == status
            assert (await server.request("GET", "/", headers=headed(name))).status == 200
            if status == 403:
                answer = await server.request("GET", "/watch/steps", headers=headed(name))
                error = answer.json()["error"]
                assert error["code"] == "loopback_only"
                assert "--without-keys open" in error["message"]


def own_addresses():
    """Of this machine, that others could have asked from."""
    found = [address for own in psutil.net_if_addrs().values() for address in own]
    return [a.address for a in found if a.family == socket.AF_INET and not is_loopback(a.address)]


@pytest.mark.skipif(not own_addresses(), reason="needs an address besides loopback")
async def test_who_comes_from_another_address_is_served_and_cannot_look_on():
    address = own_addresses()[0]
    sockets = bind(address, 0)
    try:
        async with (
            AsyncEngine(SIMULATED) as engine,
            listening(engine, sockets) as url,
            aiohttp.ClientSession() as session,
        ):
            async with session.get(f"{url}/watch/steps") as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (
                    403,
                    "loopback_only",
                )
            async with session.get(f"{url}/v1/models") as answer:
                assert answer.status == 200
    finally:
        for sock in sockets:
            sock.close()
