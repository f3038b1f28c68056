"""An engine and its workers' halves on one loop, with real sockets between them: no processes."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

from aioserve.config import EngineConfig
from aioserve.engine import AsyncEngine, EngineClient
from aioserve.fleet.workers.host import Host, WorkerClient
from aioserve.fleet.workers.remote_engine import RemoteEngine
from aioserve.outputs import RequestOutput
from aioserve.server.access.access import MainAccess


class Joined(NamedTuple):
    """What each side has of it."""

    engine: AsyncEngine
    host: Host
    remotes: list[RemoteEngine]  # the workers' engines
    clients: list[WorkerClient]  # the engine's workers


@asynccontextmanager
async def joined(config: EngineConfig, num_workers: int = 1) -> AsyncIterator[Joined]:
    """All have started, and listen as far as the engine knows."""
    async with AsyncEngine(config) as engine, connected(engine, num_workers) as rest:
        yield Joined(engine, *rest)


@asynccontextmanager
async def connected(
    engine: AsyncEngine, num_workers: int
) -> AsyncIterator[tuple[Host, list[RemoteEngine], list[WorkerClient]]]:
    """The same of an engine that has started."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        access = MainAccess(engine.config)
        access.count_for(engine)
        host = Host(engine, access)
        stack.callback(host.shutdown)
        clients, remotes = [], []
        for number in range(num_workers):
            address, is_up = f"ipc://{folder}/{number}", asyncio.Event()
            clients.append(host.open(f"worker-{number}", address, is_up.set))
            remote = RemoteEngine(address)
            stack.callback(remote.close)
            await remote.start()
            remote.begin()
            await is_up.wait()
            remotes.append(remote)
        yield host, remotes, clients


async def read(front: EngineClient, prompt, params=None, **fields) -> list[RequestOutput]:
    """What comes of a request, whole, by sample: deltas are merged as a slow reader gets them."""
    whole: dict[int, RequestOutput] = {}
    async with await front.add_request(prompt, params, **fields) as stream:
        async for output in stream:
            if output.index in whole:
                whole[output.index].merge(output)
            else:
                whole[output.index] = output
    return [whole[index] for index in sorted(whole)]


async def idle(engine: AsyncEngine) -> None:
    """Until nobody has a block, or a step is in flight."""
    while (stats := engine.get_stats()) and (  # noqa: ASYNC110
        stats.num_used_kv_blocks or stats.num_running_reqs or stats.num_waiting_reqs
    ):
        await asyncio.sleep(0.001)
