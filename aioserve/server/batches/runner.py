"""Runs batches: finds those that are not over, and asks the routes of this process for their lines.

One process does, of all that share the directory: the one that holds its lock, for as long as it
lives. The next one goes on where it was. It finds new batches, and those to be cancelled, by
looking: whichever process a client has asked, the directory is what they share.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from aiohttp import web

from aioserve.operations.command import Counted
from aioserve.server.access.access import ACCESS
from aioserve.server.access.keys import Key
from aioserve.server.batches.directory import Disk
from aioserve.server.batches.gauges import batch_gauges
from aioserve.server.batches.inner import Inner
from aioserve.server.batches.results import Answered, result_id
from aioserve.server.batches.room import is_full, sweep, usage
from aioserve.server.batches.stored import StoredBatch
from aioserve.server.batches.verdict import MAX_TRIES, again, is_failure, result_line
from aioserve.server.batches.work import Work

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
SWEEP_SECONDS = 60.0
USAGE_SECONDS = 5.0
KEY_SECONDS = 5.0  # until a key that is not known now is looked for again

#: Batches that run at once, in turns; each has three files open.
MAX_RUNNING = 32

#: Hints of every line, for the policy.
HINTS = {"offline": True}


class Runner:
    """The batches of one directory, in the process that may be the one to run them."""

    def __init__(self, app: web.Application, disk: Disk, max_bytes: int) -> None:
        """`max_bytes` is the limit of a line."""
        self._app, self._disk = app, disk
        self._inner = Inner(app, max_bytes)
        self._places = asyncio.Semaphore(disk.settings.batch_concurrency)
        self._places_of: dict[tuple[str, int], asyncio.Semaphore] = {}  # of keys with a limit
        self._works: dict[str, tuple[Work, asyncio.Task[None]]] = {}
        self._ended: set[str] = set()  # batches: nothing is to be done for them
        self._without_key: set[str] = set()  # batches whose key is gone, as the log has told
        self._lock: int | None = None
        self._seen: list[StoredBatch] = []  # that had not ended at the last look

    def tell(self) -> list[Counted]:
        """How many batches this process runs, and how far they are; nothing if another one does."""
        return batch_gauges(s.batch for s in self._seen) if self._lock is not None else []

    async def run(self) -> None:
        """Own the directory once no other process does, and run its batches until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._own()
                for look, seconds in (
                    (self._look, LOOK_SECONDS),
                    (self._measure, USAGE_SECONDS),
                    (self._sweep, SWEEP_SECONDS),
                ):
                    group.create_task(_again_and_again(look, seconds))
        finally:
            tasks = [task for _, task in self._works.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._lock is not None:
                os.close(self._lock)

    async def _own(self) -> None:
        """Wait until no other process runs batches here."""
        lock = os.open(self._disk.root / "owner", os.O_RDWR | os.O_CREAT, 0o600)
        has_said = False
        try:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not has_said:
                        logger.info("another process runs the batches of %s", self._disk.root)
                    has_said = True
                    await asyncio.sleep(LOOK_SECONDS)
        except BaseException:
            os.close(lock)
            raise
        self._lock = lock
        logger.info("batches of %s run in this process", self._disk.root)

    async def _look(self) -> None:
        """Look for batches that are new, that are to be cancelled, and that have ended."""
        for batch_id, (_, task) in list(self._works.items()):
            if task.done():
                del self._works[batch_id]
        new = []
        self._seen = await self._disk.do(self._unfinished)
        for stored in self._seen:
            work, running = self._works.get(stored.batch.id, (None, None))
            if not self._has_key(stored) and not _is_over(stored):
                self._tell_of_no_key(stored, running)
            elif work is None:
                new.append(stored)
            elif stored.batch.status == "cancelling":
                work.is_cancelled.set()
        self._without_key &= {s.batch.id for s in self._seen if not self._has_key(s)}
        owners = Counter(work.stored.owner for work, _ in self._works.values())
        for stored in [stored for stored in new if _is_over(stored)]:
            new.remove(stored)
            self._start(stored)
        while new and owners.total() < MAX_RUNNING:
            stored = min(new, key=lambda stored: owners[stored.owner])
            new.remove(stored)
            owners[stored.owner] += 1
            self._start(stored)

    def _has_key(self, stored: StoredBatch) -> bool:
        """Whether the key that a batch belongs to is there now, if there are keys at all."""
        keyring = self._app[ACCESS].keyring
        return not keyring or stored.owner in keyring.named

    def _tell_of_no_key(self, stored: StoredBatch, task: asyncio.Task[None] | None) -> None:
        """Let a batch whose key is gone stand still: it gives its place to others, and goes on, as
        after a restart, when the key is back.
        """
        if task is not None:
            task.cancel()
        if stored.batch.id not in self._without_key:
            self._without_key.add(stored.batch.id)
            logger.warning(
                "%s stands still: its key %r is not in the keys file; it goes on when the key is "
                "back, and expires with its completion window",
                *(stored.batch.id, stored.owner),
            )

    def _start(self, stored: StoredBatch) -> None:
        work = Work(self._disk, stored, self._run_line, self._inner.max_bytes)
        self._works[stored.batch.id] = (work, asyncio.create_task(self._live(work)))

    def _unfinished(self) -> list[StoredBatch]:
        """Batches on the disk that have not ended; called in a thread, as it reads files."""
        found = []
        for batch_id in self._disk.batch_ids():
            if batch_id in self._ended:
                continue
            stored = self._disk.find_batch(batch_id)
            if stored is not None and not stored.batch.has_ended:
                found.append(stored)
            elif stored is not None:
                self._ended.add(batch_id)
        return found

    async def _live(self, work: Work) -> None:
        try:
            await work.live()
        except Exception:  # of this batch alone; it is looked at again
            logger.exception("%s could not go on", work.batch.id)
            await asyncio.sleep(SWEEP_SECONDS)

    async def _measure(self) -> None:
        """Hold back batches while there is more on the disk than there may be."""
        running = [work for work, _ in self._works.values() if work.log is not None]
        if not running:
            return
        used = await self._disk.do(usage, self._disk)
        for work in running:
            if work.log is not None:
                work.log.is_full = is_full(self._disk, used, work.stored.owner)

    async def _sweep(self) -> None:
        await self._disk.do(sweep, self._disk, time.time())
        self._ended &= set(await self._disk.do(self._disk.batch_ids))

    async def _run_line(
        self, stored: StoredBatch, number: int, custom_id: str, body: bytes
    ) -> Answered:
        """Run a line, again if need be, until it has an answer."""
        batch, num_tries = stored.batch, 0
        while True:
            async with self._place(stored.owner) as key:
                asked = (batch.endpoint, body, key, HINTS, batch.id)
                request_id, response = await self._inner.ask(*asked)
            later = again(response, body)
            num_tries += later is not None and later.counts
            if later is None or num_tries >= MAX_TRIES:
                break
            await asyncio.sleep(later.seconds)
        own_id = result_id(batch.id, number)
        result = result_line(own_id, custom_id, request_id, response)
        return Answered(number, is_failure(response), result)

    @contextlib.asynccontextmanager
    async def _place(self, owner: str) -> AsyncIterator[Key | None]:
        """One of the places that batches have. Yields the key of their owner as it is now; waits
        while that is not known. Its batches have half of the requests that the key may have.
        """
        keyring = self._app[ACCESS].keyring
        while (key := keyring.named.get(owner)) is None and keyring:
            await asyncio.sleep(KEY_SECONDS)
            keyring = self._app[ACCESS].keyring
        async with contextlib.AsyncExitStack() as stack:
            if key is not None and key.max_requests is not None:
                most = max(1, key.max_requests // 2)
                places = self._places_of.setdefault((owner, most), asyncio.Semaphore(most))
                await stack.enter_async_context(places)
            await stack.enter_async_context(self._places)
            yield key


def _is_over(stored: StoredBatch) -> bool:
    """Whether none of its lines is to be run: it takes no place of another."""
    return stored.batch.status == "cancelling" or stored.batch.expires_at <= time.time()


async def _again_and_again(look: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
    while True:
        try:
            await look()
        except OSError as error:  # the disk, which may come to itself
            logger.error("batches: %s", error)
        except Exception:  # the others go on
            logger.exception("batches: %s failed", look.__name__)
        await asyncio.sleep(seconds)
