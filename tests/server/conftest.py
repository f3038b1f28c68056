"""A real server on a real socket for every test of this folder."""

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpcore2
import msgspec
import pytest

from aioserve.runner.interface import RunnerInterface
from tests.server.serving import SIMULATED, Server, running


@pytest.fixture(scope="session", autouse=True)
def certificates_read_once() -> Iterator[None]:
    """The clients of packages share the system's certificates, which no test here shows: each would
    read them all, in 20 ms.
    """
    with pytest.MonkeyPatch.context() as patch:
        read = functools.cache(httpcore2.default_ssl_context)
        patch.setattr(httpcore2, "default_ssl_context", read)
        yield


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
