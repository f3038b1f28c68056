"""A batch survives the server: every line is answered once, whatever ends the process, and when."""

import asyncio
import json
import os
import random
import resource
import signal
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from aioserve.apis.batches.disk import Disk
from aioserve.apis.batches.work import Answered, ResultLog
from aioserve.errors import ConfigError
from tests import processes
from tests.processes import PATIENCE, serving
from tests.server.batches.asking import (
    COMPLETIONS,
    completions,
    config,
    create,
    ids,
    line_ids,
    results,
    until,
)
from tests.server.batches.asking import serving as serving_here
from tests.server.serving import SIMULATED, Server

SLOW = msgspec.structs.replace(
    SIMULATED, runner=msgspec.structs.replace(SIMULATED.runner, step_base_ms=10)
)
#: Of a line that is JSON but for a character of its answer.
CUT = b'{"id": "r", "custom_id": "line 1", "response": {"body": "\xc3"}}\n'
here = pytest.mark.asyncio(loop_factories=["uvloop"])


async def answers(server: Server) -> float:
    """Requests that this server has served to their end."""
    text = (await server.get("/metrics")).body.decode()
    lines = [line for line in text.splitlines() if "requests_finished_total{" in line]
    return sum(float(line.split()[-1]) for line in lines if 'reason="abort"' not in line)


def on_disk(path: Path, batch_id: str) -> list[bytes]:
    """The lines of its output that are whole."""
    data = (path / "batches/batches" / batch_id / "output").read_bytes()
    return data.splitlines(keepends=True)[: data.count(b"\n")]


@here
async def test_lines_that_were_answered_before_a_restart_are_not_run_again(tmp_path: Path) -> None:
    async with serving_here(tmp_path, SLOW, batch_concurrency=8) as (server, client):
        batch = await create(client, completions(120))
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    before = on_disk(tmp_path, batch.id)
    assert 20 <= len(before) < 120
    async with serving_here(tmp_path, SLOW) as (server, client):
        batch = await until(client, batch.id, "completed")
        assert await answers(server) == 120 - len(before)
        content = (await client.files.content(batch.output_file_id)).content
    assert content.startswith(b"".join(before))
    assert ids([json.loads(line) for line in content.splitlines()]) == line_ids(120)


@here
@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
async def test_a_batch_goes_on_from_every_status(tmp_path: Path, status: Any) -> None:
    """As a crash leaves it: with half of its answers, one of them cut off."""
    async with serving_here(tmp_path, max_batches=1) as (_, client):
        batch = await create(client, completions(10))
        done = await until(client, batch.id, "completed")
        output = (await client.files.content(done.output_file_id)).content.splitlines(keepends=True)
        await client.files.delete(done.output_file_id)
    disk = Disk(config(tmp_path).batches)
    stored = disk.find_batch(batch.id)
    assert stored is not None
    stored.batch.status, stored.batch.completed_at, stored.batch.output_file_id = status, None, None
    half = output if status == "finalizing" else output[:5]
    folder = disk.folder(batch.id)
    (folder / "output").write_bytes(b"".join(half) + output[0][:40])
    (folder / "input").write_bytes(completions(10))
    disk.save_batch(stored)
    disk.close()
    end = "cancelled" if status == "cancelling" else "completed"
    async with serving_here(tmp_path) as (server, client):
        batch = await until(client, batch.id, end)
        assert await answers(server) == (5 if status in ("validating", "in_progress") else 0)
        told = await results(client, batch.output_file_id)
        errors = await results(client, batch.error_file_id)
    assert ids(told + errors) == line_ids(10)
    assert [msgspec.json.decode(line) for line in half] == told[: len(half)]


@here
async def test_two_servers_on_one_directory_answer_each_line_once(tmp_path: Path) -> None:
    """One of them runs batches; when it ends, the other one does. Either takes and tells them."""
    async with serving_here(tmp_path, SLOW, batch_concurrency=4) as (_, client):
        async with serving_here(tmp_path, SLOW) as (_, other):
            batch = await create(other, completions(60))
            await until(client, batch.id, "in_progress")
            again = await create(client, completions(3))
            assert (await other.batches.cancel(again.id)).status == "cancelling"
            await until(client, again.id, "cancelled")
        batch = await until(client, batch.id, "completed")
        assert ids(await results(client, batch.output_file_id)) == line_ids(60)


def test_what_a_full_disk_has_cut_off_is_written_over(tmp_path: Path) -> None:
    """The limit of the size of files stands for the end of the disk."""
    result = b'{"id": "r%d", "custom_id": "line %d"}\n'
    log = ResultLog(tmp_path / "output", tmp_path / "errors", sync_seconds=0)
    answered = [Answered(i, i % 4 == 0, result % (i, i)) for i in range(100)]
    log.write(answered[:50])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.output.size + 50, hard))
    try:
        for _ in range(3):
            with pytest.raises(OSError, match="File too large"):
                log.write(answered[50:])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write(answered[50:])
    log.close()
    again = ResultLog(tmp_path / "output", tmp_path / "errors", sync_seconds=0)
    completed, failed = again.recover()
    again.close()
    assert completed == [f"line {i}" for i in range(100) if i % 4]
    assert failed == [f"line {i}" for i in range(0, 100, 4)]


@pytest.mark.parametrize("garbage", [b"\0" * 5000, b"{", b'{"id": 1}\n', b"\xff\n", CUT])
def test_what_a_power_failure_leaves_at_the_end_is_cut_off(tmp_path: Path, garbage: bytes) -> None:
    whole = b'{"id": "r", "custom_id": "line 0"}\n'
    (tmp_path / "output").write_bytes(whole + garbage + whole)
    log = ResultLog(tmp_path / "output", tmp_path / "errors", sync_seconds=0)
    assert log.recover() == (["line 0"], [])
    log.write([Answered(1, False, whole)])
    log.close()
    assert (tmp_path / "output").read_bytes() == 2 * whole


def test_results_that_cannot_be_opened_keep_no_file_open(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    before = os.listdir("/proc/self/fd")
    with pytest.raises(IsADirectoryError):
        ResultLog(tmp_path / "output", tmp_path / "errors", sync_seconds=0)
    assert os.listdir("/proc/self/fd") == before


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "batches").write_text("a file")
    with pytest.raises(ConfigError, match=r"cannot use batches\.batch_dir"):
        Disk(config(tmp_path).batches)


ARGUMENTS = [
    *("--runner", "simulated", "--step-base-ms", "20", "--step-prefill-token-us", "1"),
    *("--policy", "aioserve.apis.batches.policy:OfflineScheduler"),
]


def ask(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=PATIENCE) as response:
        return json.loads(response.read())


def is_answered(url: str, batch_id: str, number: int) -> bool:
    answered: int = ask(url, f"/v1/batches/{batch_id}")["request_counts"]["completed"]
    return answered >= number


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("workers", [0, 2])
def test_kill_9_in_the_middle_loses_no_line_and_answers_none_twice(
    tmp_path: Path, workers: int
) -> None:
    """Again and again at a moment by chance. With workers, the one that runs batches dies first."""
    arguments = [*ARGUMENTS, "--batch-dir", str(tmp_path / "batches")]
    arguments += ["--api-workers", str(workers)] if workers else []
    number, rng, batch_id = 1500, random.Random(1), ""
    before: list[bytes] = []
    for life in range(5):
        with serving(*arguments, is_shared=True) as (process, url):
            if not batch_id:
                with openai.OpenAI(base_url=url + "/v1", api_key="none") as client:
                    data = completions(number, max_tokens=6)
                    file = client.files.create(file=("in.jsonl", data), purpose="batch")
                    batch_id = client.batches.create(
                        input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
                    ).id
            wanted = len(before) + rng.randrange(50, 200)
            is_far = partial(is_answered, url, batch_id, wanted)
            processes.until(is_far, f"{wanted} lines are answered")
            process.send_signal(signal.SIGKILL)
            process.wait()
        after = on_disk(tmp_path, batch_id)
        assert after[: len(before)] == before, life  # those that were answered stay what they were
        before = after
    assert wanted <= len(before) < number
    with (
        serving(*arguments, is_shared=True) as (_, url),
        openai.OpenAI(base_url=url + "/v1", api_key="none") as c,
    ):
        processes.until(lambda: c.batches.retrieve(batch_id).status == "completed", "the end")
        batch = c.batches.retrieve(batch_id)
        content = c.files.content(batch.output_file_id or "").content
        assert batch.error_file_id is None
        assert batch.request_counts is not None
        assert batch.request_counts.completed == number
        page = urllib.request.urlopen(url + "/metrics", timeout=PATIENCE).read().decode()
    assert content.startswith(b"".join(before))
    lines = [json.loads(line) for line in content.splitlines()]
    assert ids(lines) == line_ids(number)
    served = [line for line in page.splitlines() if "aioserve_requests_finished_total{" in line]
    assert sum(float(line.split()[-1]) for line in served) == number - len(before)


@pytest.mark.slow
@pytest.mark.dist
def test_a_full_disk_holds_a_batch_back_and_no_stream(tmp_path: Path) -> None:
    """The limit of the size of files stands for the end of the disk; it is lifted at last."""
    arguments = [*ARGUMENTS, "--batch-dir", str(tmp_path / "batches")]
    with (
        serving(*arguments, is_shared=True) as (process, url),
        openai.OpenAI(base_url=url + "/v1", api_key="none") as client,
    ):
        file = client.files.create(file=("a.jsonl", completions(300)), purpose="batch")
        limit = 40_000  # more than the file; less than the answers
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, hard))
        batch = client.batches.create(
            input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
        )
        output = tmp_path / "batches/batches" / batch.id / "output"
        is_full = lambda: output.exists() and output.stat().st_size == limit  # noqa: E731
        processes.until(is_full, "the disk is full")
        stream = client.completions.create(
            model="embedded", prompt="x", max_tokens=100, stream=True
        )
        assert len(list(stream)) > 10
        stuck = client.batches.retrieve(batch.id)
        assert stuck.status == "in_progress"
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        processes.until(lambda: client.batches.retrieve(batch.id).status == "completed", "the end")
        done = client.batches.retrieve(batch.id)
        content = client.files.content(done.output_file_id or "").text
    assert ids([json.loads(line) for line in content.splitlines()]) == line_ids(300)
