"""Runs batches: finds those that are not over, and asks this process's routes for their lines.

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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from aiohttp import StreamReader, hdrs, web
from aiohttp.http import HttpVersion11, RawRequestMessage, StreamWriter
from aiohttp.typedefs import Handler
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from aioserve.apis import responses
from aioserve.apis.batches.disk import DISK, Disk, StoredBatch, is_full, sweep, usage
from aioserve.apis.batches.protocol import Batch, LineResponse, LineResult, Status
from aioserve.apis.batches.work import Answered, Work, result_id
from aioserve.engine.operations.command import Counted
from aioserve.errors import (
    EngineDeadError,
    EngineOverloadedError,
    RequestError,
    RequestIdInUseError,
)
from aioserve.server import completions, embeddings
from aioserve.server.access.access import ACCESS
from aioserve.server.access.keys import Key
from aioserve.server.chat import routes as chat
from aioserve.server.errors import status_of
from aioserve.server.middleware import HTTP_COUNTS, answer_errors
from aioserve.server.running import ENGINE, KEY, OWN_HINTS, RESPONSE_ID, make_id

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
        """Return how many batches this process runs, and how far they are; nothing if another one
        does.
        """
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
        """Return whether the key that a batch belongs to is there now, if there are keys at all."""
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
    """Return whether none of its lines is to be run: it takes no place of another."""
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


# Begins with the application.


def open_batches(app: web.Application, max_bytes: int) -> None:
    """Keep files and batches for this application in the directory of the settings; `max_bytes` is
    the limit of a body. Batches run while the application does. Raises `ConfigError`.
    """
    disk = app[DISK] = Disk(app[ENGINE].config.batches)
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


# Requests of the server's own: the handlers of the API, asked without a connection. A line of a
# batch goes the way of a request over HTTP: the same decoding, checks, limits and words of refusal.
# It has no client that could leave; what runs it may be cancelled, which aborts it.


#: By route, what lines of batches can ask for.
HANDLERS: Mapping[str, Handler] = {
    "/v1/chat/completions": chat.create_chat_completion,
    "/v1/completions": completions.create_completion,
    "/v1/embeddings": embeddings.create_embedding,
    "/v1/responses": responses.create_response,
}


class _Asked(msgspec.Struct):
    stream: Any = None


_asked = msgspec.json.Decoder(_Asked)
_HEADERS = CIMultiDictProxy(CIMultiDict({hdrs.CONTENT_TYPE: "application/json"}))


class InnerRequest(web.Request):
    """A request whose body is here, and which belongs to an application without its router."""

    ATTRS = web.Request.ATTRS | {"_own_app"}

    def __init__(
        self,
        app: web.Application,
        path: str,
        body: bytes,
        protocol: web.RequestHandler,
        *,
        name: str,
        max_bytes: int,
    ) -> None:
        """`name` stands in the log where a client's address would."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        payload = StreamReader(protocol, len(body) + 1, loop=loop)
        payload.feed_data(body)
        payload.feed_eof()
        version, url = HttpVersion11, URL(path)
        message = RawRequestMessage(
            "POST", path, version, _HEADERS, (), True, None, False, False, url
        )
        super().__init__(
            *(message, payload, protocol, StreamWriter(protocol, loop), task, loop),
            client_max_size=max_bytes,
            remote=name,
        )
        self._own_app = app

    @property
    def app(self) -> web.Application:
        return self._own_app


class Inner:
    """The inner side of an application: asks its handlers."""

    def __init__(self, app: web.Application, max_bytes: int) -> None:
        """`max_bytes` is the limit of a body, as over HTTP."""
        self.max_bytes = max_bytes
        self._app = app
        self._protocol = web.RequestHandler(  # never connected
            web.Server(self._refuse), loop=asyncio.get_running_loop()
        )

    async def ask(
        self, path: str, body: bytes, key: Key | None, hints: Mapping[str, bool], name: str
    ) -> tuple[str, web.Response]:
        """Return an id, as in the log, and the answer or the refusal that a client with that key
        would get. `hints` go before those of the body. Cancelled, it aborts what was asked for.
        """
        request = InnerRequest(
            self._app, path, body, self._protocol, name=name, max_bytes=self.max_bytes
        )
        request[OWN_HINTS] = dict(hints)
        if key is not None:
            request[KEY] = key
        handler = _refuse_stream if _asked.decode(body).stream is True else HANDLERS[path]
        response = await answer_errors(request, handler)
        assert isinstance(response, web.Response)
        return request.get(RESPONSE_ID) or make_id(), response

    async def _refuse(self, request: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError("it has no connection")


async def _refuse_stream(request: web.Request) -> web.StreamResponse:
    """Refuse a line that asks for a stream."""
    raise RequestError(
        "stream must not be true in a line of a batch: its result is written to a file",
        param="stream",
    )


# What becomes of an answer to a line: it is kept, or the line is run again later. A batch has time:
# what would send a client away for now, such as a full queue, makes a line wait.


#: Times that a line is run whose request was ended from outside, or has failed here.
MAX_TRIES = 3
MIN_WAIT, MAX_WAIT = 1.0, 30.0  # seconds until a line is run again

#: Not now: that says nothing of the line.
_NOT_NOW = {
    status_of(error, "") for error in (EngineOverloadedError, EngineDeadError, RequestIdInUseError)
}
_FAILED_HERE = ("request_failed", "internal_error", "request_aborted")
_TIMED_OUT = "request_timeout"


class Again(NamedTuple):
    """Run the line again after that time; `counts`: as one of its `MAX_TRIES`."""

    seconds: float
    counts: bool


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    code: str | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Body(msgspec.Struct):
    """The part of an answer that tells how it ended."""

    choices: list[_Choice] = []
    error: _Error | None = None
    incomplete_details: _Incomplete | None = None


class _Stated(msgspec.Struct):
    timeout: float | None = None


_body = msgspec.json.Decoder(_Body)
_stated = msgspec.json.Decoder(_Stated)
_encoder = msgspec.json.Encoder()


def again(response: web.Response, body: bytes) -> Again | None:
    """Return when to run the line with that body again; None: this is its answer."""
    if response.status in _NOT_NOW:
        told = response.headers.get(hdrs.RETRY_AFTER, "")
        seconds = float(told) if told.isdigit() else MIN_WAIT
        return Again(min(max(seconds, MIN_WAIT), MAX_WAIT), counts=False)
    ends = _ends(response)
    if ends & {"abort", *_FAILED_HERE}:
        return Again(MIN_WAIT, counts=True)
    if ends & {"timeout", _TIMED_OUT} and _stated.decode(body).timeout is None:
        return Again(MIN_WAIT, counts=True)  # of the queue: the server's limit, not the line's
    return None


def _ends(response: web.Response) -> set[str]:
    """Return how the choices of an answer ended, or the code of an error."""
    body = _body.decode(_bytes(response))
    found = {choice.finish_reason for choice in body.choices}
    if body.error is not None:
        found.add(body.error.code)
    if body.incomplete_details is not None:
        found.add(body.incomplete_details.reason)
    return {end for end in found if end is not None}


def is_failure(response: web.Response) -> bool:
    """Return whether the answer belongs to the file of errors."""
    return response.status >= 400


def result_line(result_id: str, custom_id: str, request_id: str, response: web.Response) -> bytes:
    """Return the line of the output that tells an answer."""
    answer = LineResponse(
        status_code=response.status,
        request_id=request_id,
        body=msgspec.Raw(_bytes(response)),
    )
    return _encoder.encode(LineResult(id=result_id, custom_id=custom_id, response=answer)) + b"\n"


def _bytes(response: web.Response) -> bytes:
    assert isinstance(response.body, bytes)
    return response.body


# How many batches there are, and how many of their lines are answered, for /metrics. Knows batches
# as their owners see them. Knows no disk and no process.


UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")


def batch_gauges(batches: Iterable[Batch]) -> list[Counted]:
    """Return gauges of the batches that have not ended: their number by status, and the number of
    their lines by whether each has an answer. The lines of a batch are known once it is
    `in_progress`.
    """
    statuses: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for batch in batches:
        statuses[batch.status] += 1
        counts = batch.request_counts
        lines["completed"] += counts.completed
        lines["failed"] += counts.failed
        lines["waiting"] += counts.total - counts.completed - counts.failed
    return [
        Counted(
            "batches",
            "Batches that have not ended, by status",
            ("status",),
            [((status,), statuses[status]) for status in UNFINISHED],
            is_gauge=True,
        ),
        Counted(
            "batch_lines",
            "Lines of batches that run: answered, answered with an error, or neither yet",
            ("state",),
            [((state,), lines[state]) for state in ("waiting", "completed", "failed")],
            is_gauge=True,
        ),
    ]
