"""A request that the policy rejects is told so in HTTP's words."""

from pathlib import Path
from typing import Any

from aioserve import SamplingParams
from tests.scheduler.test_rejection import one_at_a_time


async def test_over_http_it_is_a_429_with_retry_after(start_server: Any, tmp_path: Path) -> None:
    scheduler = {"policy": one_at_a_time(tmp_path), "options": {}}
    body = {"prompt": [1, 2], "max_tokens": 2}
    async with start_server(scheduler=scheduler) as server:
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        async with await server.engine.add_request([1, 2], params):
            for stream in (False, True):
                reply = await server.request(
                    "POST", "/v1/completions", json=body | {"stream": stream}
                )
                assert reply.status == 429
                assert reply.headers["Retry-After"] == "7"
                assert reply.json()["error"]["code"] == "request_rejected"
