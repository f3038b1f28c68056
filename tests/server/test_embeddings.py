"""/v1/embeddings: every input gets its vector, or the body a refusal that names the place."""

import asyncio
import base64

import numpy as np
import pytest

from aioserve import PoolingParams
from tests.server.bad_bodies import check
from tests.server.raw_client import IDLE, RawClient, until, until_idle


async def embed(server, **body):
    return await server.request("POST", "/v1/embeddings", json=body)


async def test_inputs_of_every_kind_get_their_own_vectors_in_order(server):
    texts = ["Who's there?", "Nay, answer me.", "Who's there?"]
    ids = [await server.engine.tokenize(text) for text in texts]
    alone = [(await server.engine.embed(text)).embedding for text in texts]
    of_texts, of_ids = [(await embed(server, input=given)).json() for given in (texts, ids)]
    assert of_texts["data"] == of_ids["data"]
    assert [item["index"] for item in of_texts["data"]] == [0, 1, 2]
    for item, expected in zip(of_texts["data"], alone, strict=True):
        assert item["object"] == "embedding"
        assert np.array(item["embedding"], np.float32).tolist() == expected.tolist()
    count = sum(map(len, ids))
    assert of_texts["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (of_texts["object"], of_texts["model"]) == ("list", "embedded")
    for one in (texts[0], ids[0]):
        assert (await embed(server, input=one)).json()["data"] == of_texts["data"][:1]


async def test_base64_holds_the_same_float32(server):
    numbers = (await embed(server, input="x")).json()["data"][0]["embedding"]
    text = (await embed(server, input="x", encoding_format="base64")).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == numbers


async def test_fields_reach_the_engine(server, monkeypatch):
    asked = []
    real = server.front.embed

    async def note(prompt, params, **fields):
        asked.append((prompt, params, fields))
        return await real(prompt, params, **fields)

    monkeypatch.setattr(server.front, "embed", note)
    answer = await embed(
        server,
        input=[5, 6, 7],
        model="embedded",
        pooling="mean",
        normalize=False,
        truncate_prompt_tokens=2,
        user="ann",
        priority=-1,
        timeout=60,
        cache_salt="s",
        request_id="x",
    )
    assert answer.headers["X-Request-Id"] == "x"
    assert answer.json()["usage"]["prompt_tokens"] == 2
    params = PoolingParams(pooling="mean", normalize=False, truncate_prompt_tokens=2)
    fields = {"user": "ann", "priority": -1, "timeout": 60, "cache_salt": "s", "request_id": "x"}
    fields |= {"client": "127.0.0.1", "adapter": "embedded"}
    assert asked == [([5, 6, 7], params, fields)]


async def test_more_inputs_than_the_queue_holds_are_served_a_few_at_a_time(start_server):
    limits = {"max_num_seqs": 2, "max_waiting_requests": 2}
    async with start_server(scheduler=limits) as server:
        answer = await embed(server, input=[[i] for i in range(40)])
        assert [item["index"] for item in answer.json()["data"]] == list(range(40))


NOT_EMBEDDED = [
    ({}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": [[5], []]}, "input[1]"),
    ({"input": ["a", [5]]}, "input"),
    ({"input": [5, "a"]}, "input"),
    ({"input": [5, 10**9]}, "input"),
    ({"input": [[5], [-1]]}, "input[1]"),
    ({"input": [[5], [True]]}, "input[1][0]"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": ["a", "word " * 20_000]}, "input[1]"),
    ({"input": [5] * 4097}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 64}, "dimensions"),
    ({"input": "a", "pooling": "cls"}, "pooling"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "timeout": 0}, "timeout"),
    ({"input": "a", "request_id": ""}, "request_id"),
    ({"input": "a", "temperature": 1}, "temperature"),
]


async def test_what_cannot_be_embedded_is_refused_by_its_place(server):
    for body, param in NOT_EMBEDDED:
        assert check(await embed(server, **body))["param"] == param, str(body)[:80]


LONG = [[7] * 2500] * 3  # 64 tokens per step: each needs many


@pytest.mark.slow
async def test_a_client_that_leaves_frees_the_blocks_of_all_its_inputs(start_server):
    async with start_server(runner={"step_base_ms": 50}) as server:
        client = await RawClient.post(server, "/v1/embeddings", input=LONG)
        await until(server, lambda gauges: gauges["num_requests_running"] == len(LONG))
        await client.leave()
        await until_idle(server, num_aborted=len(LONG))


async def test_what_is_aborted_or_late_is_an_error_and_not_half_a_vector(start_server):
    async with start_server(runner={"step_base_ms": 50}) as server:
        asked = asyncio.create_task(embed(server, input=LONG * 30, request_id="x"))
        await until(server, lambda gauges: gauges["num_requests_running"] > 0)
        assert (await server.request("POST", "/v1/abort", json={"request_id": "x"})).status == 200
        assert check(await asked)["code"] == "request_aborted"
        error = check(await embed(server, input=LONG, timeout=0.01), 408)
        assert error["code"] == "request_timeout"
        await until(server, lambda gauges: gauges == IDLE)


async def test_metrics_tell_prompts_and_no_first_tokens(server):
    await embed(server, input=[[5, 6, 7], [8]])
    lines = (await server.get("/metrics")).body.decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(values["aioserve_prompt_tokens_total"]) == 4
    assert float(values["aioserve_generation_tokens_total"]) == 0
    assert float(values["aioserve_time_to_first_token_seconds_count"]) == 0
    assert float(values["aioserve_request_latency_seconds_count"]) == 2
    assert float(values['aioserve_requests_finished_total{reason="stop"}']) == 2
