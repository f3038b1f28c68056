"""Batches by `AsyncClient`, and what /metrics tells of them."""

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aioserve import AsyncClient
from aioserve.errors import RequestError
from tests.server.batches.asking import COMPLETIONS, completions, ids, line_ids, serving
from tests.server.serving import Server

# The loop is the subject of other tests.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


async def test_a_batch_goes_from_a_file_to_its_answers(tmp_path: Path) -> None:
    lines = tmp_path / "mine.jsonl"
    lines.write_bytes(completions(5))
    async with serving(tmp_path) as (server, _), AsyncClient(server.url) as client:
        file = await client.files.create(lines, expires_after_seconds=7200)
        assert (file.filename, file.bytes) == ("mine.jsonl", len(completions(5)))
        assert file.expires_at - file.created_at == 7200
        batch = await client.batches.create(file.id, COMPLETIONS, metadata={"run": "first"})
        assert batch.metadata == {"run": "first"}
        batch = await client.batches.wait(batch.id, poll_seconds=0.02)
        assert (batch.status, batch.request_counts.completed) == ("completed", 5)
        assert batch.output_file_id is not None
        output = (await client.files.content(batch.output_file_id)).splitlines()
        assert ids([json.loads(line) for line in output]) == line_ids(5)
        assert [b.id for b in (await client.batches.list(limit=1)).data] == [batch.id]
        listed = await client.files.list(purpose="batch", order="asc")
        assert [f.id for f in listed.data] == [file.id]
        assert (await client.files.retrieve(file.id)).bytes == file.bytes
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(RequestError, match="no file"):
            await client.files.retrieve(file.id)


async def test_a_batch_is_cancelled_and_what_there_is_not_is_an_error_of_the_request(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as (server, _), AsyncClient(server.url) as client:
        file = await client.files.create(completions(400, max_tokens=40))
        batch = await client.batches.create(file.id, COMPLETIONS, completion_window="1h")
        await client.batches.cancel(batch.id)
        assert (await client.batches.wait(batch.id, poll_seconds=0.02)).status == "cancelled"
        with pytest.raises(RequestError, match="it cannot be cancelled"):
            await client.batches.cancel(batch.id)
        with pytest.raises(RequestError, match=r"no batch 'batch_/\.\./x' is kept here"):
            await client.batches.retrieve("batch_/../x")
        with pytest.raises(RequestError, match="completion_window"):
            await client.batches.create(file.id, COMPLETIONS, completion_window="soon")


async def gauges(server: Server) -> dict[str, float]:
    """Values of the gauges of batches, by their label."""
    text = (await server.get("/metrics")).body.decode()
    families = text_string_to_metric_families(text)
    return {
        value: sample.value
        for family in families
        if family.name.startswith("aioserve_batch") and family.type == "gauge"
        for sample in family.samples
        for name, value in sample.labels.items()
        if name != "process"
    }


async def test_metrics_tell_how_many_batches_there_are_and_how_far_they_are(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, batch_concurrency=1) as (server, _),
        AsyncClient(server.url) as client,
    ):
        file = await client.files.create(completions(3000, max_tokens=60))
        batch = await client.batches.create(file.id, COMPLETIONS)
        while not (found := await gauges(server)).get("completed"):
            pass
        assert found["in_progress"] == 1
        assert found["failed"] == 0
        assert found["completed"] + found["waiting"] == 3000
        await client.batches.cancel(batch.id)
        await client.batches.wait(batch.id, poll_seconds=0.02)
        while (found := await gauges(server))["waiting"]:
            pass
        assert set(found.values()) == {0}
