"""A real server on a real socket for every test of this folder."""

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from aioserve.engine import template_renderer
from aioserve.runner.interface import RunnerInterface
from tests.server.serving import SIMULATED, Server, running


@pytest.fixture(scope="session")
def idle_renderers() -> Iterator[list[Any]]:
    """Processes that render chats and belong to no server at the moment."""
    idle: list[Any] = []
    yield idle
    template_renderer._end_all(idle)


@pytest.fixture(autouse=True)
def kept_renderers(idle_renderers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that rendered one test's chats renders those of the next: to start it takes longer
    than most tests. Its ends are the subject of tests/engine/test_chat_template.py.
    """
    start = template_renderer._Process

    def started() -> Any:
        with suppress(IndexError):  # none is idle
            while (process := idle_renderers.pop())._process.poll() is not None:
                process.end()
            return process
        return start()

    def keep(processes: list[Any]) -> None:
        while processes:
            idle_renderers.append(processes.pop())

    monkeypatch.setattr(template_renderer, "_Process", started)
    monkeypatch.setattr(template_renderer, "_end_all", keep)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """On invented tokens, one step per millisecond."""
    async with running() as server:
        yield server


@pytest.fixture
def start_server():
    """`async with start_server(runner={"step_base_ms": 9}) as server:`, from `SIMULATED`."""

    def start(runner_double: RunnerInterface | None = None, **sections: dict[str, Any]):
        changed = {
            section: msgspec.structs.replace(getattr(SIMULATED, section), **fields)
            for section, fields in sections.items()
        }
        return running(msgspec.structs.replace(SIMULATED, **changed), runner_double)

    return start
