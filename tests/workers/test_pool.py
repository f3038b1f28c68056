"""What becomes of a worker that cannot be started, without any process."""

import pytest

from aioserve.engine import AsyncEngine
from aioserve.errors import WorkerError
from aioserve.fleet.workers import pool
from aioserve.fleet.workers.pool import WorkerPool
from aioserve.server.access.access import MainAccess
from aioserve.server.sockets import ListenSockets
from tests.server.serving import SIMULATED


@pytest.mark.parametrize(
    ("folder", "words"),
    [("a" * 100, "File name too long"), ("", "Too many open files")],
    ids=["a long path", "no descriptor"],
)
async def test_workers_that_cannot_be_started_again_end_the_server_with_a_line(
    folder, words, tmp_path, monkeypatch
):
    monkeypatch.setattr(pool, "FIRST_DELAY", 0.0)

    async def refuse(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("asyncio.create_subprocess_exec", refuse)
    has_stopped = []
    async with AsyncEngine(SIMULATED) as engine:
        workers = WorkerPool(
            *(engine, ListenSockets([], []), MainAccess(SIMULATED), tmp_path / folder),
            lambda: has_stopped.append(True),
        )
        (tmp_path / folder).mkdir(exist_ok=True)
        await workers._keep("worker-0", lambda: None)
        await workers.close()
    assert has_stopped == [True]
    assert isinstance(workers.failure, WorkerError)
    assert "worker-0 has ended 3 times before it served, at its start" in str(workers.failure)
    assert words in str(workers.failure)
