"""KV blocks as files in a directory that engines may share, one file per block.

A file is believed if its checksum fits, and never before it has its name. A user who could write
here could choose what the model reads, and one who could read here would learn of prompts: all of
it is its owner's alone. Knows names, bytes and threads. Knows no requests, and nothing about what
is in a block.
"""

import asyncio
import errno
import hashlib
import logging
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from aioserve.errors import UNREADABLE, ConfigError
from aioserve.features.kv_connector.interface import BlockStore
from aioserve.kv_cache import HASH_BYTES

logger = logging.getLogger(__name__)

T = TypeVar("T")

FORMAT = 1
PREFIX, SUFFIX, TEMPORARY = "aioserve-kv-", ".kv", ".tmp"
NAMESPACE_FILE = "namespace.json"
_HEADER = struct.Struct("<16s16sQ32s")  # magic, hash of the block, its bytes, checksum
_MAGIC = b"aioserve kv %d\n" % FORMAT
PRIVATE, OTHERS = 0o700, 0o077  # modes of folders: the owner's alone, and what others could do
NUM_READERS = 2  # a second request need not wait for a long one; a guess
RESCAN_SHARE = 1 / 16  # of the limit: after this share was written, the directory is read again
ABANDONED_SECONDS = 3600.0  # a temporary file of that age is of a process that has died
PAUSE_SECONDS = 10.0  # without a write after one has failed: a full disk is not asked every time
LOG_SECONDS = 60.0  # between two lines about the same trouble


class _BadFileError(Exception):
    """Raised for a file that is not the block that is looked for."""


class _Entry(NamedTuple):
    used: float  # when it was last wanted, seconds since 1970
    size: int
    path: str


class BlockDirectory(BlockStore):
    """The blocks of one namespace: those of engines that would compute the same bytes."""

    def __init__(
        self,
        path: Path,
        identity: dict[str, str],
        block_bytes: int,
        memory: Callable[[int], memoryview],
        *,
        max_bytes: int,
        identify: Callable[[str], dict[str, str]] | None = None,
    ) -> None:
        """`identity` is all that must be equal for blocks to be the same, and `identify` says it of
        another model's path; `memory` gives the bytes of a slot. To be made on the event loop.
        Raises `ConfigError` if the directory is of no use.
        """
        self._root = path.expanduser().absolute()
        self._name = secrets.token_hex(8)  # of temporary files; pids are not unique in containers
        self._memory = memory
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._identify = identify
        self._folder = self._make_folder(identity)
        self._loop = asyncio.get_running_loop()
        self._readers = ThreadPoolExecutor(NUM_READERS, thread_name_prefix="aioserve-kv-read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="aioserve-kv-write")
        self._is_closed = False
        self._is_off = False  # while weights change, and if there is no folder for them
        # What follows is the writer's, and read elsewhere.
        self._num_bytes_unseen = 0  # written since the directory was last looked at
        self._num_written = 0
        self._paused_until = 0.0
        self._trouble = _Trouble()
        self._lock = threading.Lock()  # around the counts that several threads raise
        self._writer.submit(self._clean_up)

    @property
    def folder(self) -> Path:
        """The folder with the blocks of the namespace."""
        return self._folder

    # On the event loop.

    def find(self, block_hashes: Sequence[bytes], on_found: Callable[[int], None]) -> None:
        work = partial(self._find, self._folder, list(block_hashes))
        self._run(self._readers, work, on_found, 0)

    def find_each(
        self, block_hashes: Sequence[bytes], on_found: Callable[[frozenset[bytes]], None]
    ) -> None:
        nothing: frozenset[bytes] = frozenset()
        work = partial(self._find_each, self._folder, list(block_hashes))
        self._run(self._readers, work, on_found, nothing)

    def read(
        self, block_hashes: Sequence[bytes], slots: Sequence[int], on_read: Callable[[int], None]
    ) -> None:
        work = partial(self._read_all, self._folder, list(zip(block_hashes, slots, strict=True)))
        self._run(self._readers, work, on_read, 0)

    def write(
        self, block_hashes: Sequence[bytes], slots: Sequence[int], on_written: Callable[[], None]
    ) -> None:
        work = partial(self._write_all, self._folder, list(zip(block_hashes, slots, strict=True)))
        self._run(self._writer, work, lambda _: on_written(), None)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        return self._loop.call_later(seconds, callback).cancel

    def seconds_to_read(self, num_bytes: int) -> float:
        num_read = self.num_bytes_read
        return self.read_seconds / num_read * num_bytes if num_read else 0.0

    async def change_weights(self, path: str) -> None:
        """Use the folder of these weights; where there can be none, no block is found or kept."""
        assert self._identify is not None, "it is served for models alone"
        self._is_off, identify = True, self._identify
        try:
            self._folder = await asyncio.to_thread(lambda: self._make_folder(identify(path)))
        except (OSError, ConfigError) as error:
            self._note_failure(f"keeps no blocks of {path}", error)
        else:
            self._is_off = False

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.to_thread(self._end_threads)

    def _end_threads(self) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _run(
        self,
        pool: ThreadPoolExecutor,
        work: Callable[[], T],
        callback: Callable[[T], None],
        nothing: T,
    ) -> None:
        """Call back with what the work returns, or with `nothing` if it raises."""
        if self._is_off:
            self._loop.call_soon(callback, nothing)
            return

        def done(future: asyncio.Future[T]) -> None:
            if future.cancelled() or (self._is_closed and pool is self._readers):
                return
            error = future.exception()
            if error is not None:
                self._note_failure("failed", error)
            callback(nothing if error is not None else future.result())

        self._loop.run_in_executor(pool, work).add_done_callback(done)

    # On a thread that reads.

    def _find(self, folder: Path, block_hashes: list[bytes]) -> int:
        for i, block_hash in enumerate(block_hashes):
            if not self._path(block_hash, folder).exists():
                return i
        return len(block_hashes)

    def _find_each(self, folder: Path, block_hashes: list[bytes]) -> frozenset[bytes]:
        return frozenset(found for found in block_hashes if self._path(found, folder).exists())

    def _read_all(self, folder: Path, pairs: list[tuple[bytes, int]]) -> int:
        began, num_read, num_bytes = time.perf_counter(), 0, 0
        for block_hash, slot in pairs:
            if not self._read_one(self._path(block_hash, folder), block_hash, slot):
                break
            num_read += 1
            num_bytes += len(self._memory(slot))
        with self._lock:
            self.num_bytes_read += num_bytes
            self.read_seconds += time.perf_counter() - began
        return num_read

    def _read_one(self, path: Path, block_hash: bytes, slot: int) -> bool:
        memory, header = self._memory(slot), bytearray(_HEADER.size)
        try:
            with FileIO(path, "rb", opener=_open_at_once) as file:
                num_bytes = os.readv(file.fileno(), [header, memory])
                rest = file.read(1)
            _check(block_hash, header, memory, num_bytes, rest)
            with suppress(OSError):  # another user's, whose engine cleans up
                os.utime(path)  # wanted: not the next to go
            return True
        except FileNotFoundError:
            return False  # it has given way meanwhile
        except _BadFileError as error:
            self._note_failure(f"does not believe {path}", error)
            with suppress(OSError):
                path.unlink()  # it would be in the way of a good one
        except OSError as error:
            self._note_failure(f"cannot read {path}", error)
        return False

    # On the thread that writes.

    def _write_all(self, folder: Path, pairs: list[tuple[bytes, int]]) -> None:
        for block_hash, slot in pairs:
            if time.monotonic() < self._paused_until:
                return
            path = self._path(block_hash, folder)
            if path.exists():
                continue
            try:
                self._write_one(path, block_hash, self._memory(slot))
            except OSError as error:
                self._paused_until = time.monotonic() + PAUSE_SECONDS
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                what = "is full" if full else f"cannot write {path}"
                self._note_failure(f"{what}, and goes on without new blocks", error)
                return
            if self._num_bytes_unseen > self._max_bytes * RESCAN_SHARE:
                self._clean_up()

    def _write_one(self, path: Path, block_hash: bytes, memory: memoryview) -> None:
        """Write a whole file, or nothing under that name."""
        self._num_written += 1
        temporary = path.with_name(f".{self._name}.{self._num_written}{TEMPORARY}")
        own_hash = block_hash[:HASH_BYTES]
        header = _HEADER.pack(_MAGIC, own_hash, len(memory), _checksum(block_hash, memory))
        try:
            try:
                file = FileIO(temporary, "xb", opener=_open_private)
            except FileNotFoundError:
                for folder in (self._root, path.parent.parent, path.parent):
                    _make_private(folder)
                file = FileIO(temporary, "xb", opener=_open_private)
            with file:
                num_bytes = os.writev(file.fileno(), [header, memory])
            if num_bytes < len(header) + len(memory):
                raise OSError(errno.ENOSPC, "only a part of the block could be written")
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        self._num_bytes_unseen += num_bytes
        self.num_bytes_written += num_bytes

    def _clean_up(self) -> None:
        """Have no more bytes in the directory than may be: the least recently used go first,
        whichever engine wrote them. Other files are left alone, and not counted.
        """
        entries: list[_Entry] = []
        for folder in self._root.glob(f"{PREFIX}*/??"):
            # Another engine may clean up as well: what is gone is passed over, the rest is counted.
            with suppress(OSError), os.scandir(folder) as found:
                for item in found:
                    with suppress(OSError):
                        about = item.stat()
                        if item.name.endswith(SUFFIX):
                            entries.append(_Entry(about.st_mtime, about.st_size, item.path))
                        elif item.name.endswith(TEMPORARY):
                            if about.st_mtime < time.time() - ABANDONED_SECONDS:
                                os.unlink(item.path)
        self._num_bytes_unseen = 0
        too_many = sum(entry.size for entry in entries) - self._max_bytes * (1 - RESCAN_SHARE)
        for entry in sorted(entries):
            if too_many <= 0:
                return
            try:
                os.unlink(entry.path)
            except FileNotFoundError:
                pass
            except OSError:
                continue  # another user's: of ours, more have to go
            too_many -= entry.size

    # Anywhere.

    def _path(self, block_hash: bytes, folder: Path | None = None) -> Path:
        """Return the file of a block, by default in the folder of the weights of now."""
        name, pool = block_hash[:HASH_BYTES].hex(), block_hash[HASH_BYTES:].decode()
        return (folder or self._folder) / name[:2] / f"{name}{'.' if pool else ''}{pool}{SUFFIX}"

    def _make_folder(self, identity: dict[str, str]) -> Path:
        """Return the folder of blocks of this identity, made if need be. Raises `ConfigError`."""
        identity = identity | {"block bytes": str(self._block_bytes)}
        digest = hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()
        found = self._root / f"{PREFIX}{digest[:32]}"
        note = found / NAMESPACE_FILE
        try:
            self._root.parent.mkdir(parents=True, exist_ok=True)
            _make_private(self._root)
            _make_private(found)
            self._check_owner(found)
            written = _read_note(note)
            if written is None:
                temporary = found / f".{self._name}{TEMPORARY}"
                with open(temporary, "xb", opener=_open_private) as file:
                    file.write(msgspec.json.format(msgspec.json.encode(identity)))
                temporary.replace(note)
                written = identity
        except OSError as error:
            raise ConfigError(
                f"cache.kv_connector_path {self._root} cannot be used: {error}"
            ) from error
        if written != identity:
            raise ConfigError(
                f"cache.kv_connector_path: {note} is not of this model and these settings: remove "
                f"{found}"
            )
        return found

    def _check_owner(self, folder: Path) -> None:
        """Close what an earlier version has left open. Raises `OSError`, and `ConfigError` if the
        folder is another user's, whose blocks would be believed.
        """
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigError(
                f"cache.kv_connector_path: {folder} is not a folder of this user's, and what "
                "is in it would be believed: name another directory"
            )
        if found.st_mode & OTHERS:
            folder.chmod(PRIVATE)
        mode = self._root.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            logger.warning(
                "kv connector: other users may put their own folder in the place of %s: name a "
                "directory that only this user can write to, or one that is not there yet",
                folder,
            )

    def _note_failure(self, what: str, error: BaseException) -> None:
        with self._lock:
            self.num_failures += 1
            num_held = self._trouble.let_through()
        if num_held is not None:
            more = f" ({num_held} more were not logged)" if num_held else ""
            logger.warning("kv connector: %s %s: %s%s", self._root, what, error, more)


class _Trouble:
    """A throttle that lets one line through in `LOG_SECONDS`, and counts what it held back."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._num_held = 0

    def let_through(self) -> int | None:
        """Return how many were held back since the last one; None: hold this one back, too."""
        now = time.monotonic()
        if self._last is not None and now - self._last < LOG_SECONDS:
            self._num_held += 1
            return None
        num_held, self._num_held, self._last = self._num_held, 0, now
        return num_held


def _make_private(folder: Path) -> None:
    """Make a folder for its owner alone, unless it is there. Raises `OSError`."""
    folder.mkdir(mode=PRIVATE, exist_ok=True)


def _open_private(path: str, flags: int) -> int:
    """Return an opener for `open`, whatever the umask."""
    return os.open(path, flags, PRIVATE & 0o666)


def _open_at_once(path: str, flags: int) -> int:
    """Return an opener that does not wait for a writer of a FIFO, which is read as empty."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_note(path: Path) -> object:
    """Return what it says; None if it is not there, or was cut off when the power went."""
    try:
        with FileIO(path, "rb", opener=_open_at_once) as file:
            return msgspec.json.decode(file.read())
    except (FileNotFoundError, *UNREADABLE):
        return None


def _checksum(block_hash: bytes, memory: memoryview) -> bytes:
    """Return a checksum of the block, its hash and the pool's name, so that no file passes for
    another.
    """
    digest = hashlib.sha256(block_hash)
    digest.update(memory)
    return digest.digest()


def _check(
    block_hash: bytes, header: bytearray, memory: memoryview, num_bytes: int, rest: bytes
) -> None:
    if num_bytes != _HEADER.size + len(memory) or rest:
        raise _BadFileError("it has another length than a block")
    magic, own_hash, length, checksum = _HEADER.unpack(header)
    if (
        magic.rstrip(b"\0") != _MAGIC
        or own_hash != block_hash[:HASH_BYTES]
        or length != len(memory)
    ):
        raise _BadFileError("it is not a block, or another one")
    if checksum != _checksum(block_hash, memory):
        raise _BadFileError("its checksum does not fit")
