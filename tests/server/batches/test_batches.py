"""Batches by the official `openai` client: uploaded, run in the background, downloaded."""

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from aioserve.config import SchedulerConfig
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.what_if import make_workload, read_traffic
from tests.processes import PATIENCE
from tests.server.bad_bodies import check, mutations
from tests.server.batches.asking import (
    CHAT,
    COMPLETIONS,
    completions,
    create,
    ids,
    jsonl,
    line_ids,
    results,
    serving,
    until,
)
from tests.server.serving import SIMULATED, Server

# The loop is the subject of other tests.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

MESSAGES = [{"role": "user", "content": "What news?"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 4},
    COMPLETIONS: {"prompt": "Once", "max_tokens": 4},
    "/v1/embeddings": {"input": "Once"},
    "/v1/responses": {"input": "Once", "max_output_tokens": 4},
}


@pytest.mark.parametrize("endpoint", BODIES)
async def test_a_batch_is_answered_as_its_route_answers(tmp_path: Path, endpoint: str) -> None:
    body = BODIES[endpoint]
    async with serving(tmp_path) as (server, client):
        data = jsonl(endpoint, body, {**body, "temperature": -1}, body)
        batch = await create(client, data, endpoint, metadata={"run": "first"})
        assert (batch.status, batch.metadata) == ("validating", {"run": "first"})
        batch = await until(client, batch.id, "completed")
        alone = await server.request("POST", endpoint, json=body)
        wrong = await server.request("POST", endpoint, json={**body, "temperature": -1})
        output = await results(client, batch.output_file_id)
        errors = await results(client, batch.error_file_id)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
    assert sorted(line["custom_id"] for line in output) == ["line 0", "line 2"]
    for line in output:
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"].keys() == alone.json().keys()
        assert line["error"] is None
    assert [line["custom_id"] for line in errors] == ["line 1"]
    assert errors[0]["response"]["status_code"] == wrong.status == 400
    assert errors[0]["response"]["body"] == wrong.json()


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, "/v1/responses"])
async def test_a_line_that_asks_for_a_stream_fails_alone(tmp_path: Path, endpoint: str) -> None:
    body = BODIES[endpoint]
    streams: list[Any] = [True, "yes", 1]
    async with serving(tmp_path) as (_, client):
        asked = [
            body,
            *({**body, "stream": stream} for stream in streams),
            {**body, "stream": False},
        ]
        batch = await create(client, jsonl(endpoint, *asked), endpoint)
        batch = await until(client, batch.id, "completed")
        output = await results(client, batch.output_file_id)
        errors = await results(client, batch.error_file_id)
    assert ids(output) == ["line 0", "line 4"]
    assert ids(errors) == ["line 1", "line 2", "line 3"]
    told = {line["custom_id"]: line["response"] for line in errors}
    assert {response["status_code"] for response in told.values()} == {400}
    error = told["line 1"]["body"]["error"]
    assert error["param"] == "stream"
    assert "must not be true in a line of a batch" in error["message"]


async def test_a_long_batch_answers_every_line_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        batch = await create(client, completions(300))
        batch = await until(client, batch.id, "completed")
        output = await results(client, batch.output_file_id)
        listed = await client.batches.list()
    assert ids(output) == line_ids(300)
    assert len({line["id"] for line in output}) == 300
    assert batch.error_file_id is None
    assert [b.id for b in listed.data] == [batch.id]
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert list(times) == sorted(times)


WRONG_LINES = [
    (b"", "empty_file", None),
    (b"\n\n", "empty_file", None),
    (b"{", "invalid_json_line", 1),
    (b"\xff", "invalid_json_line", 1),
    (b"[]", "invalid_request", 1),
    (b"{}", "invalid_request", 1),
    (completions(1) + completions(1), "duplicate_custom_id", 2),
    (jsonl(CHAT, {}), "mismatched_url", 1),
    (jsonl(COMPLETIONS, {}, method="GET"), "invalid_request", 1),
    (jsonl(COMPLETIONS, {}, extra=1), "invalid_request", 1),
    (b"\n" + jsonl(COMPLETIONS, [1]), "invalid_request", 2),  # type: ignore[arg-type]
    (completions(6), "too_many_lines", 6),
    (jsonl(COMPLETIONS, {"prompt": "x" * 2**20}), "line_too_long", 1),
]


async def test_a_wrong_line_fails_the_batch_and_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path, max_batch_lines=5) as (server, client):
        for data, code, line in WRONG_LINES:
            batch = await until(client, (await create(client, data)).id, "failed")
            assert (await server.gauges())["num_requests_running"] == 0
            (error,) = batch.errors.data
            assert (error.code, error.line) == (code, line), data[:80]
            assert error.message
            assert batch.failed_at
            assert batch.output_file_id is None
            folder = tmp_path / "batches/batches" / batch.id
            async with asyncio.timeout(PATIENCE):  # its input goes after it is told to have failed
                while True:
                    if list(folder.iterdir()) == [folder / "batch.json"]:
                        break
                    await asyncio.sleep(0.01)


async def test_a_cancelled_batch_keeps_its_answers_and_tells_of_the_others(tmp_path: Path) -> None:
    slow = msgspec.structs.replace(SIMULATED.runner, step_base_ms=20)
    base = msgspec.structs.replace(SIMULATED, runner=slow)
    async with serving(tmp_path, base, batch_concurrency=4) as (server, client):
        batch = await create(client, completions(200))
        await some_answers(client, batch.id)
        asked = await client.batches.cancel(batch.id)
        assert asked.status == "cancelling"
        batch = await until(client, batch.id, "cancelled")
        assert (await server.gauges())["num_requests_running"] == 0
        output = await results(client, batch.output_file_id)
        errors = await results(client, batch.error_file_id)
        with pytest.raises(openai.BadRequestError, match="is cancelled: it cannot be"):
            await client.batches.cancel(batch.id)
    assert output
    assert errors
    assert ids(output + errors) == line_ids(200)
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    counts = batch.request_counts
    assert (counts.completed, counts.failed) == (len(output), len(errors))
    assert batch.cancelling_at <= batch.cancelled_at


async def test_a_late_batch_expires_with_what_it_has(tmp_path: Path) -> None:
    slow = msgspec.structs.replace(SIMULATED.runner, step_base_ms=20)
    base = msgspec.structs.replace(SIMULATED, runner=slow)
    async with serving(tmp_path, base, batch_concurrency=2) as (server, client):
        batch = await create(client, completions(500), completion_window="2s")
        assert batch.expires_at == batch.created_at + 2
        batch = await until(client, batch.id, "expired")
        assert (await server.gauges())["num_requests_running"] == 0
        output = await results(client, batch.output_file_id)
        errors = await results(client, batch.error_file_id)
    assert ids(output + errors) == line_ids(500)
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert batch.expired_at >= batch.expires_at


async def some_answers(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    """The batch, when some of its lines are answered."""
    while True:
        batch = await until(client, batch_id, "in_progress")
        if batch.request_counts.completed:
            return batch
        await asyncio.sleep(0.02)


async def test_a_batch_goes_on_when_its_input_is_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        batch = await create(client, completions(50))
        await client.files.delete(batch.input_file_id)
        batch = await until(client, batch.id, "completed")
        assert ids(await results(client, batch.output_file_id)) == line_ids(50)


async def test_a_full_queue_makes_lines_wait_and_fails_none(tmp_path: Path) -> None:
    scheduler = msgspec.structs.replace(SIMULATED.scheduler, max_num_seqs=1, max_waiting_requests=1)
    base = msgspec.structs.replace(SIMULATED, scheduler=scheduler)
    async with serving(tmp_path, base, batch_concurrency=6) as (_, client):
        batch = await create(client, completions(12))
        batch = await until(client, batch.id, "completed")
        assert batch.error_file_id is None
        assert ids(await results(client, batch.output_file_id)) == line_ids(12)


async def test_lines_are_offline_to_the_policy_whatever_they_say(tmp_path: Path) -> None:
    log = tmp_path / "decisions"
    scheduler = SchedulerConfig(decision_log=str(log))
    base = msgspec.structs.replace(SIMULATED, scheduler=scheduler)
    body = {"prompt": "x", "max_tokens": 1}
    stated = {**body, "hints": {"offline": False, "program": "p"}}
    async with serving(tmp_path, base) as (server, client):
        batch = await create(client, jsonl(COMPLETIONS, body, stated))
        await until(client, batch.id, "completed")
        await server.complete("online", max_tokens=20, ignore_eos=True)
    workload = make_workload(read_traffic(DecisionLog(log)), "log")
    hints = [json.dumps(request.hints, sort_keys=True) for request in workload.requests]
    assert sorted(hints) == ['{"offline": true, "program": "p"}', '{"offline": true}', "{}"]


async def test_a_server_without_a_directory_says_how_to_have_one(server: Server) -> None:
    for method, path in (
        ("POST", "/v1/files"),
        ("GET", "/v1/files"),
        ("GET", "/v1/files/x"),
        ("GET", "/v1/files/x/content"),
        ("DELETE", "/v1/files/x"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/batches/x"),
        ("POST", "/v1/batches/x/cancel"),
    ):
        good = {"input_file_id": "x", "endpoint": CHAT, "completion_window": "24h"}
        options = {"json": good} if (method, path) == ("POST", "/v1/batches") else {}
        answer = await server.request(method, path, **options)
        assert answer.status == 404, path
        assert "--batch-dir DIRECTORY" in answer.json()["error"]["message"]


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": "/v1/moderations"}, "endpoint"),
    ({"completion_window": "soon"}, "completion_window"),
    ({"input_file_id": "file-" + "0" * 32}, "input_file_id"),
    ({"input_file_id": "../../etc/passwd"}, "input_file_id"),
    ({"metadata": {"k": "x" * 513}}, "metadata[...]"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
    ({"input_file": "x"}, "input_file"),
]


async def test_a_wrong_field_of_a_batch_is_refused_by_name(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, client):
        for fields, param in WRONG_FIELDS:
            file = await client.files.create(file=("a.jsonl", completions(1)), purpose="batch")
            body = {
                "input_file_id": file.id,
                "endpoint": CHAT,
                "completion_window": "24h",
                **fields,
            }
            answer = await server.request("POST", "/v1/batches", json=body)
            assert answer.status == 400, fields
            assert answer.json()["error"]["param"].startswith(param)


async def test_whatever_is_wrong_with_a_body_it_is_refused_in_words(tmp_path: Path) -> None:
    async with serving(tmp_path, max_batches=500) as (server, client):
        file = await client.files.create(file=("a.jsonl", completions(1)), purpose="batch")
        good = {
            "input_file_id": file.id,
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
            "metadata": {"a": "b"},
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        }
        statuses = set()
        for body in mutations(good):
            answer = await server.request("POST", "/v1/batches", json=body)
            statuses.add(answer.status)
            if answer.status != 200:
                check(answer)
        assert statuses == {200, 400}
        path = f"/v1/batches/{(await create(client, completions(1))).id}/cancel"
        assert check(await server.request("POST", path, json={"now": True}))["param"] == "now"
