"""A request that is aborted by its id ends with what there is, and says so."""

import asyncio
import json

import pytest

from tests.processes import PATIENCE
from tests.server.raw_client import until
from tests.tokenizing import hold_tokenizing

LONG = {"max_tokens": 3000, "ignore_eos": True}


async def abort(server, request_id):
    return await server.request("POST", "/v1/abort", json={"request_id": request_id})


async def until_running(server, number):
    await until(server, lambda gauges: gauges["num_requests_running"] >= number)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_reader_of_an_aborted_request_gets_what_there_is(server, stream):
    fields = {**LONG, "request_id": "x", "stream": stream}
    answering = asyncio.create_task(server.complete(["Once", "Twice"], **fields))
    await until_running(server, 2)
    assert (await abort(server, "x-1")).json() == {"request_id": "x-1", "aborted": True}
    assert (await abort(server, "x-1")).status == 404
    assert (await abort(server, "x")).status == 200
    answer = await answering
    chunks = answer.events() if stream else [answer.json()]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [reason for reason in reasons if reason] == ["abort", "abort"]
    async with asyncio.timeout(PATIENCE):  # the step in flight gives its blocks back
        while any((await server.gauges()).values()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    gone = await abort(server, "x")
    assert (gone.status, gone.json()["error"]["code"]) == (404, "request_not_found")


async def test_prompts_that_still_are_to_come_are_aborted_with_the_response(server, monkeypatch):
    """They are long, so that no token comes before a worker's word of the abort."""
    may_go_on = hold_tokenizing(monkeypatch)
    fields = {**LONG, "request_id": "x"}
    answering = asyncio.create_task(server.complete(["x" * 2100, "y" * 2100], **fields))
    async with asyncio.timeout(PATIENCE):
        while (await abort(server, "x")).status == 404:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    assert (await server.complete(max_tokens=1, request_id="x")).status == 409
    may_go_on.set()
    choices = json.loads((await answering).body)["choices"]
    assert [(c["finish_reason"], c["text"]) for c in choices] == [("abort", "")] * 2
