"""The way of a batch's answers to the disk: a queue on the loop, and one writer at a time.

What waits goes in one write. While the disk takes nothing, the queue fills, and no further line is
run; no stream notices. Knows nothing about what an answer says.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from aioserve.server.batches.directory import Disk
from aioserve.server.batches.protocol import RequestCounts
from aioserve.server.batches.results import Answered, ResultLog
from aioserve.server.batches.stored import write_whole

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # until a disk that took nothing is tried again
TELL_SECONDS = 0.5  # between two looks at how far a batch is

_encoder = msgspec.json.Encoder()


class Answers:
    """The answers of one batch on their way to the disk."""

    def __init__(self, disk: Disk, log: ResultLog, counts: RequestCounts, told: Path) -> None:
        """`told` is the file that says how far the batch is."""
        self.counts = counts
        self.is_done = bytearray(counts.total)  # by number of the line, 1 if it is on the disk
        self._disk, self._log, self._told = disk, log, told
        self._told_at = 0.0
        self._queue: asyncio.Queue[Answered] = asyncio.Queue(disk.settings.batch_concurrency)

    def note(self, answered: Answered) -> None:
        """Count a line whose answer is on the disk. Raises `AssertionError` for a second answer."""
        if self.is_done[answered.number]:
            raise AssertionError(f"line {answered.number} was answered twice")
        self.is_done[answered.number] = 1
        self.counts.failed += answered.is_error
        self.counts.completed += not answered.is_error

    async def put(self, answered: Answered) -> None:
        """Queue an answer to be written; waits while the queue is full."""
        await self._queue.put(answered)

    async def written(self) -> None:
        """Wait until all queued answers are on the disk."""
        await self._queue.join()

    async def write(self) -> None:
        """Write queued answers until cancelled."""
        while True:
            taken = [await self._queue.get()]
            while not self._queue.empty():
                taken.append(self._queue.get_nowait())
            await self.write_now(taken)
            for _ in taken:
                self._queue.task_done()

    async def write_now(self, taken: Sequence[Answered], *, synced: bool = False) -> None:
        """Write them, and try again for as long as the disk does not take them."""
        has_failed = False
        while True:
            try:
                await self._disk.do(self._log.write, taken, synced=synced)
                break
            except OSError as error:
                if not has_failed:
                    logger.error("%s waits: the disk takes no answer: %s", self._told.parent, error)
                has_failed = True
                await asyncio.sleep(RETRY_SECONDS)
        for answered in taken:
            self.note(answered)
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self._told_at = time.monotonic()
            data = _encoder.encode(self.counts)
            with contextlib.suppress(OSError):  # it is told next time
                await self._disk.do(write_whole, self._told, data, synced=False)
