"""Files and batches of one key are not there for another one."""

import asyncio
from pathlib import Path

import msgspec
import openai
import pytest

from aioserve.apis.batches import runner
from aioserve.config import AccessConfig, EngineConfig
from tests.server.access.conftest import ADMIN, ANN, BEN, CARL, KEYS
from tests.server.batches.asking import (
    client_of,
    completions,
    create,
    ids,
    line_ids,
    results,
    serving,
    until,
)
from tests.server.serving import SIMULATED

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


def locked(path: Path) -> EngineConfig:
    keys = path / "keys.yaml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    return msgspec.structs.replace(SIMULATED, access=AccessConfig(api_keys_file=str(keys)))


async def test_nothing_of_a_key_is_there_for_another_but_an_operators(tmp_path: Path) -> None:
    async with serving(tmp_path, locked(tmp_path), ANN) as (server, ann):
        batch = await create(ann, completions(3))
        batch = await until(ann, batch.id, "completed")
        async with client_of(server.url, CARL) as carl:
            asks = [
                carl.files.retrieve(batch.input_file_id),
                carl.files.content(batch.output_file_id),
                carl.files.delete(batch.output_file_id),
                carl.batches.retrieve(batch.id),
                carl.batches.cancel(batch.id),
            ]
            for ask in asks:
                with pytest.raises(openai.NotFoundError):
                    await ask
            with pytest.raises(openai.BadRequestError, match="no file"):
                await carl.batches.create(
                    input_file_id=batch.input_file_id,
                    endpoint="/v1/completions",
                    completion_window="24h",
                )
            assert [file async for file in carl.files.list()] == []
            assert [other async for other in carl.batches.list()] == []
        async with client_of(server.url, ADMIN) as root:
            assert [other.id async for other in root.batches.list()] == [batch.id]
            assert ids(await results(root, batch.output_file_id)) == line_ids(3)
        assert len([file async for file in ann.files.list()]) == 2


async def test_each_key_has_its_own_number_of_batches_and_share_of_the_disk(
    tmp_path: Path,
) -> None:
    slow = msgspec.structs.replace(SIMULATED.runner, step_base_ms=30)
    base = msgspec.structs.replace(locked(tmp_path), runner=slow)
    fields = {"max_batches": 2, "max_batch_gib": 12.5 / 1024, "max_batch_share": 0.5}
    async with serving(tmp_path, base, ANN, **fields) as (server, ann):
        batches = [await create(ann, completions(500)) for _ in range(2)]
        with pytest.raises(openai.BadRequestError, match="2 batches are unfinished"):
            await create(ann, completions(1))
        with pytest.raises(openai.BadRequestError, match="no room"):
            await ann.files.create(file=("a", b"x" * 2**21), purpose="batch")
        async with client_of(server.url, CARL) as carl:
            await until(carl, (await create(carl, completions(1))).id, "completed")
        for batch in batches:
            await ann.batches.cancel(batch.id)


async def test_a_batch_whose_key_is_gone_holds_no_place_and_goes_on_when_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "MAX_RUNNING", 1)
    slow = msgspec.structs.replace(SIMULATED.runner, step_base_ms=20)
    base = msgspec.structs.replace(locked(tmp_path), runner=slow)
    keys = tmp_path / "keys.yaml"
    async with serving(tmp_path, base, ANN, batch_concurrency=2) as (server, ann):
        batch = await create(ann, completions(40))
        await until(ann, batch.id, "in_progress")
        async with client_of(server.url, CARL) as carl, client_of(server.url, ADMIN) as root:
            keys.write_text(KEYS.replace("name: ann", "name: else").replace(ANN, "else" + ANN))
            server.engine.metrics.of_server.reload()
            other = await until(carl, (await create(carl, completions(3))).id, "completed")
            assert other.request_counts.completed == 3
            stood = (await root.batches.retrieve(batch.id)).request_counts.completed
            assert stood < 40
            assert (await root.batches.retrieve(batch.id)).status == "in_progress"
            told = [r.getMessage() for r in caplog.records if "stands still" in r.getMessage()]
            assert len(told) == 1
            assert batch.id in told[0]
            assert "'ann'" in told[0]
            keys.write_text(KEYS)
            server.engine.metrics.of_server.reload()
            batch = await until(ann, batch.id, "completed")
            assert ids(await results(ann, batch.output_file_id)) == line_ids(40)


async def test_a_key_with_limits_has_its_batches_within_them(tmp_path: Path) -> None:
    """Ben may have one request at once, and 200 tokens a minute: the batch waits for more."""
    async with serving(tmp_path, locked(tmp_path), BEN) as (server, ben):
        batch = await create(ben, completions(60, max_tokens=8))
        while (await ben.batches.retrieve(batch.id)).request_counts.completed < 10:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        counts = (await ben.batches.retrieve(batch.id)).request_counts
        assert counts.completed < 40
        assert counts.failed == 0
        gauges = (await server.gauges())["num_requests_running"]
        assert gauges <= 1
        await ben.batches.cancel(batch.id)
        batch = await until(ben, batch.id, "cancelled")
        errors = await results(ben, batch.error_file_id)
        assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
