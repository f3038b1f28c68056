"""A scheduler that notes every call of its interface, and the writer of what it notes.

The engine serves meanwhile: a buffer on the loop, a thread for the disk.
"""

import logging
import os
import struct
import time
import weakref
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aioserve.config import SchedulerConfig
from aioserve.errors import FROM_OUTSIDE
from aioserve.kv_cache import KVCacheManager
from aioserve.lab.decision_log.records import (
    FORMAT_VERSION,
    MAGIC,
    Added,
    Closed,
    Discarded,
    Expired,
    Finished,
    Header,
    Planned,
    Record,
    Reset,
    Shorthand,
    Switched,
    Updated,
)
from aioserve.outputs import EngineCoreOutputs, ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerInterface, SchedulerOutput
from aioserve.scheduler.delegate import DelegatingScheduler, innermost
from aioserve.support import __version__
from aioserve.support.files import begin_log
from aioserve.support.logs import BackgroundWriter, Gaps

LOG_SETTINGS = ("decision_log", "request_log")

T = TypeVar("T")
Clock = Callable[[], float]


class RecordSink(ABC):
    """The place to which records go: memory, unless more than `write` is defined."""

    @abstractmethod
    def write(self, record: Record) -> None:
        """Keep one record; never waits."""

    def flush(self) -> None:  # noqa: B027 - nothing to do is the rule
        """Write down what was kept: this is a good moment, since no request runs."""

    def fail(self, error: Exception) -> None:
        """Stop the log: a record could not be made, and later ones would not fit earlier ones."""
        raise error

    def close(self) -> None:  # noqa: B027
        """Close the sink: no more records will come."""


class FrozenClock:
    """Stands still during a call of the interface, so that one reading says it all."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._frozen: float | None = None

    def __call__(self) -> float:
        return self._clock() if self._frozen is None else self._frozen

    def freeze(self) -> float:
        """Take a reading and keep it."""
        self._frozen = self._clock()
        return self._frozen

    def thaw(self) -> None:
        """Let the clock run again."""
        self._frozen = None


def recorded(
    make_policy: Callable[..., SchedulerInterface],
    settings: SchedulerConfig,
    kv_cache: KVCacheManager,
    *,
    max_model_len: int,
    clock: Clock,
    loop_lag: "Callable[[], float] | None" = None,
) -> "RecordingScheduler":
    """Return a scheduler that is recorded to the file `settings.decision_log`. Raises `ConfigError`
    if it cannot be written, and what `make_policy` raises.
    """
    assert settings.decision_log is not None
    sink = LogWriter(Path(settings.decision_log))
    try:
        return RecordingScheduler(
            make_policy,
            settings,
            kv_cache,
            max_model_len=max_model_len,
            clock=clock,
            sink=sink,
            loop_lag=loop_lag,
        )
    except BaseException:
        sink.close()
        raise


class RecordingScheduler(DelegatingScheduler):
    """The scheduler `live`, with every call written to a `RecordSink`.

    Calls that only ask (counts, statistics, wait reasons) are not noted.
    """

    is_recording = True

    def __init__(
        self,
        make_scheduler: Callable[..., SchedulerInterface],
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        clock: Clock,
        sink: RecordSink,
        loop_lag: Clock | None = None,
        there: Sequence[Request] = (),
    ) -> None:
        """`loop_lag` says by how many seconds the event loop was late since it was last asked.
        `there` are the requests that the scheduler has already: what they have is told as if it
        were found in the cache.
        """
        self.clock = FrozenClock(clock)
        self._loop_lag = loop_lag
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len
        self._sink: RecordSink = sink
        self._short = Shorthand()
        now = self.clock.freeze()
        super().__init__(
            make_scheduler(config, kv_cache, max_model_len=max_model_len, clock=self.clock)
        )
        self.clock.thaw()
        sink.write(self._header(now, config, len(there)))
        self._first_step_id = 0  # results of steps up to this one are not noted
        self.num_added = 0  # requests that were accepted since
        if there:
            self._note_there(now, there)
        sink.flush()

    def _note_there(self, now: float, there: Sequence[Request]) -> None:
        for request in there:
            self._short.add(request.request_id)
            spec = msgspec.structs.replace(request.spec, prompt_token_ids=request.token_ids)
            self._sink.write(Added(now, spec.without_arrays(), None))
        # Running requests enter with a step without rows: the last that was planned.
        stats = self.live.make_stats()
        self._first_step_id = step_id = max(1, 0 if stats is None else stats.num_steps)
        entered = [
            (self._short.name(request.request_id), request.num_computed_tokens, list[int]())
            for request in there
            if request.status is RequestStatus.RUNNING
        ]
        counts, measured = self._counts(), (0.0, 0.0)
        self._sink.write(
            Planned(now, None, step_id, [], [], entered, [], [], [], [], [], [], *counts, *measured)
        )

    def _header(self, now: float, config: SchedulerConfig, num_there: int) -> Header:
        states, windows = self._kv_cache.states, self._kv_cache.windows
        return Header(
            time=now,
            version=__version__,
            unix_time=time.time(),
            scheduler=plain_settings(config),
            max_model_len=self._max_model_len,
            num_kv_blocks=self._kv_cache.pool.num_blocks,
            block_size=self._kv_cache.block_size,
            enable_prefix_caching=self._kv_cache.enable_prefix_caching,
            num_watermark_blocks=self._kv_cache.num_watermark_blocks,
            num_state_slots=None if states is None else states.num_slots,
            windows=None if windows is None else windows.spec,
            num_there=num_there,
            max_draft_tokens=self._kv_cache.max_draft_tokens,
        )

    # What is recorded.

    def add_request(self, request: Request) -> None:
        now, _, error = self._call(lambda: self.live.add_request(request))
        if error is None:
            self.num_added += 1
            self._short.add(request.request_id)
        self._note(lambda: Added(now, request.spec.without_arrays(), _text(error)))
        if error is not None:
            raise error

    def schedule(self) -> SchedulerOutput:
        now, output, error = self._call(self.live.schedule)
        took = self.clock() - now
        self._note(lambda: self._planned(now, output, error, took))
        return _result(output, error)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        num_before = self.live.get_num_unfinished_requests()
        now, outputs, error = self._call(
            lambda: self.live.update_from_output(scheduler_output, model_runner_output)
        )
        took = self.clock() - now
        # In most steps no request ends, and then none has to be looked for.
        num_ended = num_before - self.live.get_num_unfinished_requests()
        ended = _ended(outputs) if outputs and num_ended else []
        if scheduler_output.step_id <= self._first_step_id:  # planned before the log began
            names = self._short.names(request_id for request_id, _ in ended)
            stopped = int(RequestStatus.FINISHED_STOPPED)
            self._note(lambda: Finished(now, names, stopped, names, None))
            self._forget(request_id for request_id, _ in ended)
            return _result(outputs, error)
        self._note(
            lambda: Updated(
                now,
                _text(error),
                scheduler_output.step_id,
                model_runner_output.sampled_token_ids,
                self._short.named(model_runner_output.draft_token_ids),
                [(self._short.name(request_id), reason) for request_id, reason in ended],
                took,
                self._short.named(model_runner_output.row_values),
                self._short.names(model_runner_output.sat_out),
            )
        )
        self._forget(request_id for request_id, _ in ended)
        return _result(outputs, error)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        if request_ids is not None:
            request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        now, ended, error = self._call(
            lambda: self.live.finish_requests(request_ids, finished_status)
        )
        asked = None if request_ids is None else self._short.names(request_ids)
        names = self._short.names(ended or ())
        self._note(lambda: Finished(now, asked, int(finished_status), names, _text(error)))
        self._forget(ended or ())
        return _result(ended, error)

    def expire_requests(self) -> list[str]:
        now, ended, error = self._call(self.live.expire_requests)
        self._note(lambda: Expired(now, self._short.names(ended or ()), _text(error)))
        self._forget(ended or ())
        return _result(ended, error)

    def discard_step(self, last_step_id: int) -> list[str]:
        now, ended, error = self._call(lambda: self.live.discard_step(last_step_id))
        names = self._short.names(ended or ())
        self._note(lambda: Discarded(now, last_step_id, names, _text(error)))
        self._forget(ended or ())
        return _result(ended, error)

    def reset_prefix_cache(self) -> bool:
        now, is_empty, error = self._call(self.live.reset_prefix_cache)
        self._note(lambda: Reset(now, is_empty, _text(error)))
        return _result(is_empty, error)

    def switch(self, settings: SchedulerConfig) -> SchedulerInterface:
        now, new, error = self._call(lambda: self.live.switch(settings))
        self._note(lambda: Switched(now, plain_settings(settings), _text(error)))
        self.live = _result(new, error)
        return self

    def shutdown(self) -> None:
        now, _, error = self._call(self.live.shutdown)
        self._note(lambda: Closed(now))
        self._sink.close()
        if error is not None:
            raise error

    # How.

    def _call(self, function: Callable[[], T]) -> tuple[float, T | None, BaseException | None]:
        """Call with the clock stopped; when, the result, and what was raised instead."""
        now = self.clock.freeze()
        try:
            return now, function(), None
        except FROM_OUTSIDE:
            raise
        except BaseException as error:
            return now, None, error
        finally:
            self.clock.thaw()

    def _note(self, make_record: Callable[[], Record]) -> None:
        """A record that cannot be made must not stop the server: then the log does."""
        try:
            self._sink.write(make_record())
        except Exception as error:
            self._sink.fail(error)

    def _forget(self, request_ids: Iterable[str]) -> None:
        """They have ended: the next step may name them still, none after it does."""
        self._short.forget(request_ids)
        if not self.live.has_unfinished_requests():
            try:
                self._sink.flush()
            except Exception as error:
                self._sink.fail(error)

    def _planned(
        self,
        now: float,
        output: SchedulerOutput | None,
        error: BaseException | None,
        took: float,
    ) -> Planned:
        lag = self._loop_lag() if self._loop_lag is not None else 0.0
        if not isinstance(output, SchedulerOutput):
            text = _text(error) or f"schedule() returned {type(output).__name__}"
            return self._short.failed(now, text, self._counts(), (took, lag))
        return self._short.planned(now, output, self._counts(), (took, lag))

    def _counts(self) -> tuple[int, int, int]:
        num_used = self._kv_cache.pool.num_used_blocks
        if not isinstance(innermost(self.live), BaseScheduler):  # the blocks may be its own
            stats = self.live.make_stats()
            num_used = num_used if stats is None else stats.num_used_kv_blocks
        return *self.live.get_request_counts(), num_used


def _ended(outputs: dict[int, EngineCoreOutputs]) -> list[tuple[str, str]]:
    return [
        (output.request_id, output.finish_reason.value)
        for client_outputs in outputs.values()
        for output in client_outputs.outputs
        if output.finish_reason is not None
    ]


def plain_settings(config: SchedulerConfig) -> dict[str, Any]:
    """Return the settings without the places of logs, which say nothing about a decision."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return {name: value for name, value in plain.items() if name not in LOG_SETTINGS}


def _text(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


def _result(result: T | None, error: BaseException | None) -> T:
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # what the scheduler returned, even if nonsense


# The file: MAGIC, version, newline, then frames. A frame: length and CRC-32 of what follows (2 x 4
# bytes, little endian), then, deflated, records: length (4 bytes, little endian) and MessagePack.


logger = logging.getLogger(__name__)

FRAME_HEAD = struct.Struct("<II")
RECORD_HEAD = struct.Struct("<I")

# A crash loses what is not written yet: at most these bytes and seconds of serving.
FRAME_BYTES = 64 * 1024
FRAME_SECONDS = 1.0
# That wait for the disk. A disk that is so far behind will not catch up: a guess.
MAX_PENDING_BYTES = 64 * 2**20
# For the disk to take what waits when the server ends.
CLOSE_SECONDS = 3.0


class _End(Gaps):
    """The end of a log before that of the server: what follows a gap could not be replayed."""

    def __init__(self, path: Path) -> None:
        self.has_come = False
        self._path = path

    def come(self, error: Exception) -> None:
        """Note that the log ends now, because of `error`, and say so in the server's log once."""
        if not self.has_come:
            self.has_come = True
            logger.error("decision log %s ends here: %r", self._path, error)

    def begins(self, error: OSError) -> None:
        self.come(error)


class LogWriter(RecordSink):
    """A `RecordSink` that ends in a file. Whatever goes wrong stops the log, never the server."""

    def __init__(self, path: Path) -> None:
        """An older log of that name is kept, as `begin_log` says. Raises `ConfigError`."""
        self._end = _End(path)
        # It holds the prompts of all users: no other user of the machine may read it.
        open_file = begin_log(str(path), "decision log", 0o600)

        def begin() -> int:
            file = open_file()
            try:
                os.write(file, b"%b%d\n" % (MAGIC, FORMAT_VERSION))
            except OSError:
                os.close(file)
                raise
            return file

        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._buffered_since = time.monotonic()
        # Deflating is done on the thread too: it needs no GIL.
        self._writer = BackgroundWriter(
            begin, "decisions", self._end, max_bytes=MAX_PENDING_BYTES, encode=_frame
        )
        weakref.finalize(self, self._writer.close, 0.0)  # its thread ends with it in any case

    def write(self, record: Record) -> None:
        if self._end.has_come:
            return
        payload = self._encoder.encode(record)  # now: what it refers to will change
        self._buffer += RECORD_HEAD.pack(len(payload))
        self._buffer += payload
        if (
            len(self._buffer) >= FRAME_BYTES
            or time.monotonic() - self._buffered_since >= FRAME_SECONDS
        ):
            self.flush()

    def flush(self) -> None:
        self._buffered_since = time.monotonic()
        if self._buffer and not self._end.has_come:
            self._writer.write(bytes(self._buffer))
            self._buffer.clear()

    def fail(self, error: Exception) -> None:
        self._end.come(error)

    def close(self) -> None:
        self.flush()
        if not self._writer.close(CLOSE_SECONDS):
            self.fail(TimeoutError("its reader stands still"))


def _frame(records: bytes) -> bytes:
    body = zlib.compress(records, 1)
    return FRAME_HEAD.pack(len(body), zlib.crc32(body)) + body
