"""Writes a decision log while the engine serves: a buffer on the loop, a thread for the disk.

Knows bytes and files. What a record says is `decision_log.records`; what is recorded, and when, is
`decision_log.recorder`.

    the file:  MAGIC, version, newline, then frames
    a frame:   length and CRC-32 of what follows (2 x 4 bytes, little endian), then, deflated,
               records: length (4 bytes, little endian) and MessagePack
"""

import logging
import os
import queue
import struct
import threading
import time
import zlib
from pathlib import Path
from typing import BinaryIO

import msgspec

from aioserve.decision_log.recorder import RecordSink
from aioserve.decision_log.records import FORMAT_VERSION, MAGIC, Record
from aioserve.errors import ConfigError

logger = logging.getLogger(__name__)

FRAME_HEAD = struct.Struct("<II")
RECORD_HEAD = struct.Struct("<I")

# A crash loses what is not written yet: at most these bytes and seconds of serving.
FRAME_BYTES = 64 * 1024
FRAME_SECONDS = 1.0
# Frames that wait for the disk. A disk that is so far behind will not catch up: 64 MiB, a guess.
MAX_PENDING_FRAMES = 1024


class LogWriter(RecordSink):
    """A `RecordSink` that ends in a file. Whatever goes wrong stops the log, never the server."""

    def __init__(self, path: Path) -> None:
        """An older log of that name is kept as `<name>.previous`. Raises `ConfigError`."""
        try:
            if path.is_file():  # a device stays where it is
                path.replace(path.with_name(f"{path.name}.previous"))
            # It holds the prompts of all users: no other user of the machine may read it.
            self._file: BinaryIO = os.fdopen(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            )
        except OSError as error:
            raise ConfigError(f"cannot write decision log {path}: {error.strerror}") from error
        self._path = path
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._buffered_since = time.monotonic()
        self._is_stopped = False
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # A daemon: a process that ends without `close` must not hang on its log.
        self._thread = threading.Thread(target=self._run, name="aioserve-decision-log", daemon=True)
        self._thread.start()

    def write(self, record: Record) -> None:
        if self._is_stopped:
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
        if not self._buffer or self._is_stopped:
            return
        if self._frames.qsize() >= MAX_PENDING_FRAMES:
            self.fail(TimeoutError("the disk is too slow"))
            return
        self._frames.put(bytes(self._buffer))
        self._buffer.clear()

    def fail(self, error: Exception) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            logger.error("decision log %s ends here: %r", self._path, error)

    def close(self) -> None:
        self.flush()
        self._frames.put(None)
        self._thread.join()

    def _run(self) -> None:
        """On the thread. Deflating is done here too: it needs no GIL."""
        try:
            with self._file as file:
                file.write(b"%b%d\n" % (MAGIC, FORMAT_VERSION))
                while (frame := self._frames.get()) is not None:
                    body = zlib.compress(frame, 1)
                    file.write(FRAME_HEAD.pack(len(body), zlib.crc32(body)) + body)
                    file.flush()
        except OSError as error:
            self.fail(error)
