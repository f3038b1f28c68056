"""Where an application keeps the directory of batches, and what it says if there is none."""

import asyncio
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from aioserve.server.batches.directory import Disk
from aioserve.server.batches.runner import Runner
from aioserve.server.errors import UnknownBatchError
from aioserve.server.keys import ENGINE
from aioserve.server.middleware import HTTP_COUNTS

logger = logging.getLogger(__name__)

_DISK = web.AppKey("DISK", Disk)


def open_batches(app: web.Application, max_bytes: int) -> None:
    """Keep files and batches for this application, if the settings name a directory; `max_bytes` is
    the limit of a body. Batches run while the application does. Raises `ConfigError`.
    """
    settings = app[ENGINE].config.batches
    if settings.batch_dir is None:
        return
    disk = app[_DISK] = Disk(settings)

    runner = Runner(app, disk, max_bytes)
    app[HTTP_COUNTS].more.append(runner.tell)

    async def run_batches() -> None:
        try:
            await runner.run()
        except Exception:  # what is kept can still be read
            logger.exception("no batches run in this process any more")

    async def run(app: web.Application) -> AsyncIterator[None]:
        running = asyncio.create_task(run_batches())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            disk.close()

    app.cleanup_ctx.append(run)


def disk_of(request: web.Request) -> Disk:
    """The directory. Raises `UnknownBatchError` that says how to have one."""
    disk = request.app.get(_DISK)
    if disk is None:
        raise UnknownBatchError(
            "this server keeps no files and runs no batches: start it with --batch-dir DIRECTORY"
        )
    return disk
