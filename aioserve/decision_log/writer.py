"""Writes a decision log while the engine serves: a buffer on the loop, a thread for the disk.

Knows bytes and files. What a record says is `decision_log.records`; what is recorded, and when, is
`decision_log.recorder`.

    the file:  MAGIC, version, newline, then frames
    a frame:   length and CRC-32 of what follows (2 x 4 bytes, little endian), then, deflated,
               records: length (4 bytes, little endian) and MessagePack
"""

import logging
import os
import struct
import time
import weakref
import zlib
from pathlib import Path

import msgspec

from aioserve.decision_log.recorder import RecordSink
from aioserve.decision_log.records import FORMAT_VERSION, MAGIC, Record
from aioserve.support.files import begin_log
from aioserve.support.logs import BackgroundWriter, Gaps

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
    """Whether a log has ended before the server: what follows a gap could not be replayed."""

    def __init__(self, path: Path) -> None:
        self.has_come = False
        self._path = path

    def come(self, error: Exception) -> None:
        """It ends here."""
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
