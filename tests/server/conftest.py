"""A real server on a real socket for every test of this folder."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from aioserve.runner.interface import RunnerInterface
from tests.server.serving import SIMULATED, Server, running


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
