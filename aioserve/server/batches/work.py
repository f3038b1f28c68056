"""One batch from its input to its files: looked through, run, told.

Every step of it can be cut off at any moment and is then done again by the next start: what is
known of a batch is on the disk before anything follows from it.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from aioserve.server.batches.answers import Answers
from aioserve.server.batches.directory import DAY, Disk
from aioserve.server.batches.lines import Lines, look_through
from aioserve.server.batches.protocol import (
    BatchErrors,
    FileObject,
    LineError,
    LineResult,
    RequestCounts,
    Status,
)
from aioserve.server.batches.results import Answered, ResultLog, result_id
from aioserve.server.batches.stored import StoredBatch, StoredFile

logger = logging.getLogger(__name__)

PIECE = 512  # lines that are told at once, of those that were not run

_encoder = msgspec.json.Encoder()


class RunLine(Protocol):
    """Runs a line of a batch of that owner until it has an answer."""

    async def __call__(
        self, stored: StoredBatch, number: int, custom_id: str, body: bytes
    ) -> Answered: ...


class Work:
    """The life of a batch in the process that runs it."""

    def __init__(self, disk: Disk, stored: StoredBatch, run_line: RunLine, max_bytes: int) -> None:
        """`max_bytes` is the limit of a line."""
        self.stored, self.batch = stored, stored.batch
        self.is_cancelled = asyncio.Event()
        self.log: ResultLog | None = None
        self._disk, self._run_line, self._max_bytes = disk, run_line, max_bytes
        self._folder = disk.folder(self.batch.id)

    async def live(self) -> None:
        """Run the batch until it has ended."""
        lines = await self._look_through()
        if lines is None:
            return
        try:
            with contextlib.closing(await self._disk.do(self._open_log)) as log:
                self.log = log
                answers = await self._disk.do(self._recover, lines, log)
                await self._begin()
                end = await self._run(lines, answers, log)
                await self._end(lines, answers, log, end)
        finally:
            lines.close()

    async def _look_through(self) -> Lines | None:
        """The lines; None if the batch has failed."""
        settings = self._disk.settings
        lines = await self._disk.do(
            look_through,
            self._folder / "input",
            self.batch.endpoint,
            max_lines=settings.max_batch_lines,
            max_bytes=self._max_bytes,
        )
        if not lines.errors:
            return lines
        lines.close()
        self.batch.errors = BatchErrors(data=lines.errors)
        await self._settle("failed")
        return None

    def _open_log(self) -> ResultLog:
        names = (self._folder / "output", self._folder / "errors")
        return ResultLog(*names, self._disk.settings.batch_fsync_seconds)

    def _recover(self, lines: Lines, log: ResultLog) -> Answers:
        """Read what was answered before a restart; called in a thread."""
        counts = RequestCounts(total=len(lines))
        answers = Answers(self._disk, log, counts, self._folder / "counts.json")
        completed, failed = log.recover()
        for custom_ids, is_error in ((completed, False), (failed, True)):
            for custom_id in custom_ids:
                answers.note(Answered(lines.numbers[custom_id], is_error, b""))
        lines.numbers.clear()
        self.batch.request_counts = counts
        return answers

    async def _begin(self) -> None:
        if self.batch.status == "validating":
            self.batch.status, self.batch.in_progress_at = "in_progress", int(time.time())
            await self._disk.do(self._disk.save_batch, self.stored)
        counts = self.batch.request_counts
        logger.info(
            "%s runs: %d of its %d lines are answered",
            *(self.batch.id, counts.completed + counts.failed, counts.total),
        )

    async def _run(self, lines: Lines, answers: Answers, log: ResultLog) -> Status:
        """Run all lines until they are answered, or it is cancelled or late: its status then."""
        if self.batch.status == "cancelling":
            return "cancelled"
        if all(answers.is_done):
            return "completed"
        writing = asyncio.create_task(answers.write())
        working = asyncio.create_task(self._work_on_all(lines, answers))
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(self.is_cancelled.wait())]
        try:
            seconds = max(self.batch.expires_at - time.time(), 0)
            await _first_of(working, writing, *waiting, seconds=seconds)
            end: Status = "completed" if working.done() else "expired"
            if self.is_cancelled.is_set():
                end = "cancelled"
            await _stop(working)
            log.is_ending = True
            waiting.append(asyncio.create_task(answers.written()))
            await _first_of(waiting[-1], writing)
            return end
        finally:
            await _stop(working, writing, *waiting)

    async def _work_on_all(self, lines: Lines, answers: Answers) -> None:
        todo = iter([number for number in range(len(lines)) if not answers.is_done[number]])
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._disk.settings.batch_concurrency, len(lines))):
                group.create_task(self._work(todo, lines, answers))

    async def _work(self, todo: Iterator[int], lines: Lines, answers: Answers) -> None:
        for number in todo:
            line = await self._disk.do(lines.read, number)
            asked = (self.stored, number, line.custom_id, bytes(line.body))
            await answers.put(await self._run_line(*asked))

    async def _end(self, lines: Lines, answers: Answers, log: ResultLog, end: Status) -> None:
        """Tell of every line that was not run, make files of what there is, and say so."""
        now, log.is_ending = int(time.time()), True
        if end == "cancelled":
            self.batch.cancelling_at = self.batch.cancelling_at or now
            self.batch.status = "cancelling"
        elif end == "completed":
            self.batch.finalizing_at = self.batch.finalizing_at or now
            self.batch.status = "finalizing"
        if end != "expired":
            await self._disk.do(self._disk.save_batch, self.stored)
        left = [number for number in range(len(lines)) if not answers.is_done[number]]
        for first in range(0, len(left), PIECE):
            piece = left[first : first + PIECE]
            told = await self._disk.do(self._not_run, lines, piece, end)
            await answers.write_now(told)
        await answers.write_now((), synced=True)
        await self._disk.do(self._make_files, log)
        await self._settle(end)

    def _not_run(self, lines: Lines, numbers: list[int], end: Status) -> list[Answered]:
        """Results of lines that were not run; called in a thread, as it reads the input."""
        why = "the completion window ended" if end == "expired" else "the batch was cancelled"
        error = LineError(code=f"batch_{end}", message=f"{why} before this line was answered")
        told = []
        for number in numbers:
            custom_id = lines.read(number).custom_id
            result = LineResult(
                id=result_id(self.batch.id, number), custom_id=custom_id, error=error
            )
            told.append(Answered(number, True, _encoder.encode(result) + b"\n"))
        return told

    def _make_files(self, log: ResultLog) -> None:
        """Make files of the results; called in a thread. A second call changes nothing."""
        stored, now = self.stored, int(time.time())
        seconds = stored.output_seconds or int(self._disk.settings.batch_file_days * DAY)
        for kind, file_id, results in (
            ("output", stored.output_id, log.output),
            ("error", stored.errors_id, log.errors),
        ):
            if not results.size:
                continue
            made = FileObject(
                id=file_id,
                bytes=results.size,
                created_at=now,
                expires_at=now + seconds,
                filename=f"{self.batch.id}_{kind}.jsonl",
                purpose="batch_output",
            )
            self._disk.add_file(StoredFile(owner=stored.owner, file=made), results.path)
            setattr(self.batch, f"{kind}_file_id", file_id)

    async def _settle(self, end: Status) -> None:
        """Store that the batch has ended, with its last status."""
        self.batch.status = end
        setattr(self.batch, f"{end}_at", int(time.time()))
        await self._disk.do(self._disk.end_batch, self.stored)
        counts = self.batch.request_counts
        logger.info(
            "%s is %s: %d lines answered, %d failed",
            *(self.batch.id, end, counts.completed, counts.failed),
        )


async def _first_of(*tasks: "asyncio.Task[Any]", seconds: float | None = None) -> None:
    """Wait until one of them has ended, or that time has passed. Raises what it raised."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


async def _stop(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and wait for their ends, whatever those are."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
