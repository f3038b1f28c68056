"""Every route of the API takes hints and hands them to the policy."""

from pathlib import Path
from typing import Any

import pytest

from tests.test_hints import GOOD, noting


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/v1/embeddings", {"input": "a"}),
    ],
)
async def test_every_route_takes_hints_and_refuses_what_is_none(
    start_server: Any, tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with start_server(scheduler={"policy": noting(tmp_path), "options": {}}) as server:
        for hints, status in ((GOOD, 200), ({"A B": 1}, 400), ({"a": [1]}, 400)):
            reply = await server.request("POST", path, json={**body, "hints": hints})
            assert reply.status == status, reply.json()
        reply = await server.request("POST", path, json={**body, "hints": {"A B": 1}})
        assert "the name of a hint" in str(reply.json())
