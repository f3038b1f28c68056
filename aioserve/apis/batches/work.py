"""One batch from its input to its files: looked through, run, told.

Every step of it can be cut off at any moment and is then done again by the next start: what is
known of a batch is on the disk before anything follows from it.
"""

import asyncio
import contextlib
import errno
import logging
import os
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import msgspec

from aioserve.apis.batches.disk import DAY, Disk, StoredBatch, StoredFile, write_whole
from aioserve.apis.batches.protocol import (
    BatchError,
    BatchErrors,
    FileObject,
    Line,
    LineError,
    LineResult,
    RequestCounts,
    Status,
)
from aioserve.errors import UNREADABLE

# The input of a batch: where its lines are, what is wrong with them, and each of them again. Lines
# stay on the disk; what is kept of each is where it begins and how long it is. Blocks, so it runs
# in threads; a long file is looked at a little at a time, so that the event loop, which shares the
# interpreter, goes on beside it.


MAX_ERRORS = 100  # most errors that are told of one input
LINES_BYTES = 2**18  # bytes in a row, and then a pause; a line counts as LINE_BYTES more
LINE_BYTES = 2**12
PAUSE_SECONDS = 0.001

_line = msgspec.json.Decoder(Line)


class _Head(msgspec.Struct):
    """A body is an object; its route looks at what is in it."""


_head = msgspec.json.Decoder(_Head)


class Lines:
    """The lines of an input that was looked through."""

    def __init__(self, path: Path) -> None:
        self.offsets = array("Q")
        self.lengths = array("I")
        self.numbers: dict[str, int] = {}  # by custom_id, until they are forgotten
        self.errors: list[BatchError] = []
        self._file = os.open(path, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, number: int) -> Line:
        """Return the line of that number, from 0."""
        return _line.decode(os.pread(self._file, self.lengths[number], self.offsets[number]))

    def close(self) -> None:
        """Close the input; nothing can be read afterwards. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def look_through(path: Path, endpoint: str, *, max_lines: int, max_bytes: int) -> Lines:
    """Return all lines, with `errors` for those that no batch of `endpoint` may have; `max_bytes`
    is the limit of one of them. Empty lines are passed over.
    """
    lines = Lines(path)
    try:
        _note_all(lines, path, endpoint, max_lines, max_bytes)
    except BaseException:
        lines.close()
        raise
    if not lines and not lines.errors:
        lines.errors.append(BatchError(code="empty_file", message="the input file has no lines"))
    return lines


def paced(file: BinaryIO, max_bytes: int = -1) -> Iterator[bytes]:
    """Yield the lines of a file, each in pieces of at most `max_bytes`, with a pause now and then:
    what is done with them holds the GIL, and the event loop goes on in the pauses.
    """
    since_pause = 0
    while raw := file.readline(max_bytes):
        since_pause += len(raw) + LINE_BYTES
        if since_pause >= LINES_BYTES:
            time.sleep(PAUSE_SECONDS)
            since_pause = 0
        yield raw


def _note_all(lines: Lines, path: Path, endpoint: str, max_lines: int, max_bytes: int) -> None:
    offset = 0
    with open(path, "rb") as file:
        for place, raw in enumerate(paced(file, max_bytes + 1), start=1):
            if raw.strip():
                error = _note(lines, raw, offset, endpoint, max_lines, max_bytes)
                if error is not None:
                    error.line = place
                    lines.errors.append(error)
                    if len(lines.errors) >= MAX_ERRORS or error.code in _LAST:
                        return
            offset += len(raw)


_LAST = ("too_many_lines", "line_too_long")  # what comes after them is not looked at


def _note(
    lines: Lines, raw: bytes, offset: int, endpoint: str, max_lines: int, max_bytes: int
) -> BatchError | None:
    if len(raw) > max_bytes:
        return BatchError(
            code="line_too_long",
            message=f"the line has more than {max_bytes} bytes, the limit of a request here",
        )
    if len(lines) >= max_lines:
        return BatchError(
            code="too_many_lines",
            message=f"the input has more than {max_lines} lines (--max-batch-lines)",
        )
    try:
        line = _line.decode(raw)
        _head.decode(line.body)
    except msgspec.ValidationError as error:
        return BatchError(code="invalid_request", message=str(error))
    except UNREADABLE as error:
        return BatchError(code="invalid_json_line", message=f"the line is not valid JSON: {error}")
    if line.url != endpoint:
        return BatchError(
            code="mismatched_url",
            message=f"url must be {endpoint}, as endpoint of the batch; got {line.url[:64]!r}",
            param="url",
        )
    if line.custom_id in lines.numbers:
        return BatchError(
            code="duplicate_custom_id",
            message=f"custom_id {line.custom_id[:64]!r} is that of an earlier line",
            param="custom_id",
        )
    lines.numbers[line.custom_id] = len(lines)
    lines.offsets.append(offset)
    lines.lengths.append(len(raw))
    return None


# The answers of a batch on disk: two files that only grow, and what they hold after a crash. A line
# that is whole in one of them is answered: it is not run again. What a crash or a full disk has cut
# off is written over. Blocks, so it runs in threads, one call at a time.


class _Named(msgspec.Struct):
    """A result; its answer, which may be large, is checked to be JSON and not kept."""

    custom_id: str


_named = msgspec.json.Decoder(_Named)


class Answered(NamedTuple):
    """A line of the input, and the line about it."""

    number: int
    is_error: bool
    result: bytes  # with its newline


class _OneFile:
    """The lines of one file: those that were written whole, and those that come after."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def recover(self) -> Iterator[str]:
        """Yield the `custom_id` of every whole line. What comes after the last whole line, such as
        what a power failure has left, is cut off.
        """
        with open(self.path, "rb") as file:
            for raw in paced(file):
                try:
                    result = _named.decode(raw.decode()) if raw.endswith(b"\n") else None
                except UNREADABLE:
                    result = None
                if result is None:
                    break
                self.size += len(raw)
                yield result.custom_id
        os.ftruncate(self._file, self.size)

    def write(self, data: bytes) -> None:
        """Raises `OSError`: then it can be written again, in the same place."""
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], self.size + done)
        self.size += len(data)

    def sync(self) -> None:
        os.fdatasync(self._file)

    def close(self) -> None:
        os.close(self._file)


class ResultLog:
    """Both files: lines whose status is below 400, and the others."""

    def __init__(self, output: Path, errors: Path, sync_seconds: float) -> None:
        self.output = _OneFile(output)
        try:
            self.errors = _OneFile(errors)
        except OSError:
            self.output.close()
            raise
        self._sync_seconds = sync_seconds
        self._synced_at = time.monotonic()
        self._taken: set[bool] = set()  # of answers that failed half-way: the kinds that are in
        #: Set where the disk holds more than it may: no answer is written then, until the end.
        self.is_full = False
        self.is_ending = False

    def recover(self) -> tuple[list[str], list[str]]:
        """Return the `custom_id` of the lines that were answered, and of those that have failed."""
        return list(self.output.recover()), list(self.errors.recover())

    def write(self, answered: Sequence[Answered], *, synced: bool = False) -> None:
        """Keep these answers. Raises `OSError` if the disk does not take them, or may not: to be
        called again with the same ones.
        """
        if self.is_full and not self.is_ending:
            raise OSError(errno.EDQUOT, "batches.max_batch_gib or max_batch_share is used up")
        for file, is_error in ((self.output, False), (self.errors, True)):
            todo = [a for a in answered if a.is_error is is_error]
            if todo and is_error not in self._taken:
                file.write(b"".join(a.result for a in todo))
                self._taken.add(is_error)
        if synced or time.monotonic() - self._synced_at >= self._sync_seconds:
            self.output.sync()
            self.errors.sync()
            self._synced_at = time.monotonic()
        self._taken.clear()

    def close(self) -> None:
        self.output.close()
        self.errors.close()


def result_id(batch_id: str, number: int) -> str:
    """Return the id of the result of the line of that number."""
    return f"batch_req_{batch_id.removeprefix('batch_')}-{number}"


# The way of a batch's answers to the disk: a queue on the loop, and one writer at a time. What
# waits goes in one write. While the disk takes nothing, the queue fills, and no further line is
# run; no stream notices. Knows nothing about what an answer says.


RETRY_SECONDS = 5.0  # until a disk that took nothing is tried again
TELL_SECONDS = 0.5  # between two looks at how far a batch is


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


logger = logging.getLogger(__name__)

PIECE = 512  # lines that are told at once, of those that were not run

_encoder = msgspec.json.Encoder()


class RunLine(Protocol):
    """A function that runs a line of a batch of that owner until it has an answer."""

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
        """Return the lines; None if the batch has failed."""
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
