"""A server that keeps batches, asked by the official `openai` client."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import openai

from aioserve.config import BatchConfig, EngineConfig
from tests.processes import PATIENCE
from tests.server.serving import SIMULATED, Server, running

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def config(path: Path, base: EngineConfig = SIMULATED, **fields: Any) -> EngineConfig:
    """`base` with batches in a folder of `path`; `fields` are those of `BatchConfig`."""
    batches = BatchConfig(batch_dir=str(path / "batches"), **fields)
    return msgspec.structs.replace(base, batches=batches)


@asynccontextmanager
async def serving(
    path: Path, base: EngineConfig = SIMULATED, api_key: str = "none", **fields: Any
) -> AsyncIterator[tuple[Server, openai.AsyncOpenAI]]:
    """A server on `config`, and a client of it."""
    async with running(config(path, base, **fields)) as server, client_of(server.url, api_key) as c:
        yield server, c


def client_of(url: str, api_key: str = "none") -> openai.AsyncOpenAI:
    """One that does not try again."""
    return openai.AsyncOpenAI(
        base_url=url + "/v1", api_key=api_key, max_retries=0, timeout=PATIENCE
    )


def jsonl(endpoint: str, *bodies: dict[str, Any], **others: Any) -> bytes:
    """The input of a batch: `line 0`, `line 1` and so on."""
    lines = [
        {"custom_id": f"line {i}", "method": "POST", "url": endpoint, "body": body, **others}
        for i, body in enumerate(bodies)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def completions(number: int, max_tokens: int = 4) -> bytes:
    """The input of `number` different completions."""
    return jsonl(
        COMPLETIONS, *({"prompt": f"Act {i}", "max_tokens": max_tokens} for i in range(number))
    )


async def create(
    client: openai.AsyncOpenAI, data: bytes, endpoint: str = COMPLETIONS, **fields: Any
) -> Any:
    """A batch that the server runs for the input `data`."""
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    fields = {"completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, **fields)


async def until(client: openai.AsyncOpenAI, batch_id: str, *statuses: str) -> Any:
    """The batch, once it has one of `statuses`."""
    async with asyncio.timeout(PATIENCE):
        while (batch := await client.batches.retrieve(batch_id)).status not in statuses:
            assert batch.status not in ("completed", "failed", "expired", "cancelled"), batch
            await asyncio.sleep(0.02)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    """The lines of an output or error file; none of no file."""
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


def ids(lines: list[Any]) -> list[str]:
    """The lines that they are about, in order."""
    return sorted((line["custom_id"] for line in lines), key=lambda name: int(name.split()[1]))


def line_ids(number: int) -> list[str]:
    """The `custom_id` of each of `number` lines."""
    return [f"line {i}" for i in range(number)]
