"""POST /admin/try_policy and the report that comes of it, over HTTP."""

import asyncio

import pytest


@pytest.mark.slow
async def test_a_report_is_made_and_can_be_read_by_who_knows_its_name(start_server):
    async with start_server(server={"enable_admin": True}) as server:

        async def load():
            while True:
                await asyncio.gather(
                    *(server.complete([i + 5] * 40, max_tokens=20) for i in range(3))
                )

        loading = asyncio.create_task(load())
        body = {"policy": "fcfs", "seconds": 1}
        answer = await server.request("POST", "/admin/try_policy", json=body)
        loading.cancel()
        assert answer.status == 200, answer.body
        trial = answer.json()
        assert trial["requests"] > 2
        assert trial["missing"] == max(200 - trial["requests"], 0)
        assert "fcfs" in trial["table"]
        assert trial["on_these_requests"][0] in trial["table"].splitlines()
        assert trial["on_these_requests"][0].startswith(f"On these {trial['requests']} requests, ")
        report = await server.get(f"/{trial['report']}")
        assert report.status == 200
        assert report.headers["Content-Type"] == "text/html; charset=utf-8"
        policy = report.headers["Content-Security-Policy"]
        assert "sandbox allow-scripts;" in policy  # of no origin: it reads no key of the page
        assert "default-src 'none'" in policy
        assert "connect-src" not in policy
        assert (await server.get("/watch/reports/another")).status == 404
        await asyncio.gather(loading, return_exceptions=True)


async def test_what_cannot_be_tried_is_a_400(start_server):
    async with start_server(server={"enable_admin": True}) as server:
        for body, words in (
            ({"policy": "fcsf"}, "did you mean 'fcfs'"),
            ({"policy": "fcfs", "options": {"x": 1}}, "options of policy"),
            ({"policy": "fcfs", "seconds": 0}, "seconds must be from 1"),
            ({"policy": "fcfs", "seconds": "long"}, "seconds"),
            ({"policy": "fcfs", "requests": 0}, "requests must be from 1 to 100,000"),
            ({"seconds": 1}, "policy"),
            ({"policy": "fcfs", "minutes": 1}, "minutes"),
        ):
            answer = await server.request("POST", "/admin/try_policy", json=body)
            assert answer.status == 400, body
            assert words in answer.json()["error"]["message"]


async def test_it_is_for_operators_alone(server):
    body = {"policy": "fcfs"}
    assert (await server.request("POST", "/admin/try_policy", json=body)).status == 404
