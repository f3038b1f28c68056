"""Files and batches on disk: what is there, whose it is, how much room it takes.

The directory is all that is shared: by the API workers of a server, and with its next start. Each
object is written beside its place and renamed, so that it is there as a whole or not at all.
Blocks on the disk, so it runs in threads of its own (`Disk.do`). Knows no request and no line of a
batch.

    files/ID.json  files/ID             what is known of a file, and its bytes
    batches/ID/batch.json               the batch; while it runs, only its owner changes it
    batches/ID/input, output, errors    while it runs: its lines, and those that were answered
    batches/ID/counts.json, cancel      how far it is; and that a client wants it to end
    incoming/                           uploads that are not whole
    owner                               locked by the process that runs batches
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec
from aiohttp import web

from aioserve.apis.batches.protocol import Batch, FileObject
from aioserve.config import BatchConfig
from aioserve.errors import UNREADABLE, ConfigError, RequestError
from aioserve.server.errors import UnknownBatchError

logger = logging.getLogger(__name__)

T = TypeVar("T")

encoder = msgspec.json.Encoder()


class StoredFile(msgspec.Struct, kw_only=True):
    """A stored file: what clients are told of it, and its owner."""

    owner: str  # the name of the key that it was made with; "": there are no keys
    file: FileObject

    def is_for(self, reach: str) -> bool:
        """Return whether a client that reaches the owner `reach`, "" for all, may see it."""
        return reach in ("", self.owner)


class StoredBatch(msgspec.Struct, kw_only=True):
    """A stored batch: what clients are told of it, its owner and the files to come."""

    owner: str
    batch: Batch
    output_id: str  # of the files that it will leave
    errors_id: str
    output_seconds: int | None = None  # for which these are kept; None: as all files

    def is_for(self, reach: str) -> bool:
        """Return whether a client that reaches the owner `reach`, "" for all, may see it."""
        return reach in ("", self.owner)


files = msgspec.json.Decoder(StoredFile)
batches = msgspec.json.Decoder(StoredBatch)


def make_id(kind: str) -> str:
    """Return a new id, which sorts by the time at which it was made."""
    return f"{kind}{time.time_ns():016x}{secrets.token_hex(8)}"


def is_id(text: str, kind: str) -> bool:
    """Return whether a text can be an id of that kind, and so the name of a file."""
    return re.fullmatch(f"{kind}[0-9a-f]{{32}}", text) is not None


def private(path: str, flags: int) -> int:
    """Opens a file that no other user of the machine may read."""
    return os.open(path, flags, 0o600)


def write_whole(path: Path, data: bytes, *, synced: bool = True) -> None:
    """Write a file, in place of the one that is there, all at once."""
    beside = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    try:
        with open(beside, "xb", opener=private) as file:
            file.write(data)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if synced:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Have the disk know of new names in it."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read(path: Path, decoder: msgspec.json.Decoder[T]) -> T | None:
    """Return the content of a file; None, which is logged, if it is missing or not of this form."""
    try:
        return decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        logger.error("%s cannot be read: %s", path, error)
        return None


P = ParamSpec("P")


THREADS = 4  # a disk that hangs keeps these, and nothing else of the server
DAY = 86_400.0


class Disk:
    """The directory, and the threads that wait for it."""

    def __init__(self, settings: BatchConfig) -> None:
        """Raises `ConfigError` for a directory that cannot be made or written."""
        assert settings.batch_dir is not None
        self.settings = settings
        self.root = Path(settings.batch_dir)
        self.files, self.batches = self.root / "files", self.root / "batches"
        self.incoming = self.root / "incoming"
        self._owners: dict[str, str] = {}  # of batches, which never change them
        self._stored: dict[str, StoredFile] = {}  # files, which never change
        try:
            for path in (self.root, self.files, self.batches, self.incoming):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts of all clients
        except OSError as error:
            raise ConfigError(
                f"cannot use batches.batch_dir {self.root}: {error.strerror}"
            ) from error
        if not os.access(self.incoming, os.W_OK):
            raise ConfigError(f"cannot use batches.batch_dir {self.root}: permission denied")
        #: Held while batches are counted and one is added.
        self.counting = asyncio.Lock()
        self._threads = ThreadPoolExecutor(THREADS, "aioserve-batches")

    async def do(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it in a thread: the loop goes on, whatever the disk does. Cancelled, it waits for the
        end all the same, because the files that `work` uses may be closed after it.
        """
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, lambda: work(*args, **kwargs))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise

    def close(self) -> None:
        """Wait for what is being written; nothing is done afterwards."""
        self._threads.shutdown(cancel_futures=True)

    # Files

    def add_file(self, stored: StoredFile, content: Path) -> None:
        """Keep a file whose bytes are at `content`, on this disk. A second time nothing happens."""
        with contextlib.suppress(FileExistsError):
            os.link(content, self.content(stored.file.id))
        write_whole(self.files / f"{stored.file.id}.json", encoder.encode(stored))

    def content(self, file_id: str) -> Path:
        """Return the path at which the bytes of the file are stored."""
        return self.files / file_id

    def find_file(self, file_id: str, reach: str) -> StoredFile | None:
        """Return a stored file; None if no such file is kept for a client that reaches `reach`."""
        if not is_id(file_id, "file-"):
            return None
        stored = read(self.files / f"{file_id}.json", files)
        if stored is None or not stored.is_for(reach) or stored.file.expires_at <= time.time():
            return None
        return stored

    def list_files(self, reach: str) -> list[StoredFile]:
        """Return all files for a client that reaches `reach`, the oldest first."""
        now = time.time()
        return [s for s in self.all_files() if s.is_for(reach) and now < s.file.expires_at]

    def all_files(self) -> list[StoredFile]:
        """Return all files, the oldest first. Each is read once in a life of this process."""
        known, fresh = self._stored, {}
        for name in sorted(name for name in os.listdir(self.files) if name.endswith(".json")):
            stored = known.get(name) or read(self.files / name, files)
            if stored is not None:
                fresh[name] = stored
        self._stored = fresh
        return list(fresh.values())

    def remove_file(self, file_id: str) -> None:
        """Delete a file. A batch that has begun to read it goes on."""
        (self.files / f"{file_id}.json").unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)

    # Batches

    def folder(self, batch_id: str) -> Path:
        """Return the folder in which all of a batch is."""
        return self.batches / batch_id

    def add_batch(self, stored: StoredBatch) -> bool:
        """Keep a new batch with its input; False if that is gone."""
        folder = self.folder(stored.batch.id)
        beside = self.incoming / stored.batch.id
        beside.mkdir(mode=0o700)
        try:
            os.link(self.content(stored.batch.input_file_id), beside / "input")
        except FileNotFoundError:
            beside.rmdir()
            return False
        write_whole(beside / "batch.json", encoder.encode(stored))
        beside.rename(folder)
        sync_directory(self.batches)
        return True

    def save_batch(self, stored: StoredBatch) -> None:
        """Store a batch as the process that runs it knows it."""
        write_whole(self.folder(stored.batch.id) / "batch.json", encoder.encode(stored))

    def end_batch(self, stored: StoredBatch) -> None:
        """Store a batch that is over, and delete what it needed while it ran."""
        self.save_batch(stored)
        self.clear_batch(stored.batch.id)

    def clear_batch(self, batch_id: str) -> None:
        """Delete what a batch needs while it runs."""
        for name in ("input", "output", "errors", "counts.json", "cancel"):
            (self.folder(batch_id) / name).unlink(missing_ok=True)

    def find_batch(self, batch_id: str, reach: str = "") -> StoredBatch | None:
        """Return the batch as it is now; None if a client that reaches `reach` has no such
        batch.
        """
        if not is_id(batch_id, "batch_"):
            return None
        folder = self.folder(batch_id)
        stored = read(folder / "batch.json", batches)
        if stored is None or not stored.is_for(reach):
            return None
        batch = stored.batch
        if batch.status in ("validating", "in_progress"):
            with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):
                counts = (folder / "counts.json").read_bytes()
                batch.request_counts = msgspec.json.decode(counts, type=type(batch.request_counts))
            with contextlib.suppress(FileNotFoundError):
                batch.cancelling_at = int((folder / "cancel").stat().st_mtime)
                batch.status = "cancelling"
        return stored

    def cancel_batch(self, batch_id: str) -> None:
        """Leave word to end a batch for the process that runs it."""
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            (self.folder(batch_id) / "cancel").touch()

    def batch_ids(self) -> list[str]:
        """Return the ids of all batches that are kept, the oldest first."""
        return sorted(name for name in os.listdir(self.batches) if is_id(name, "batch_"))

    def owner_of(self, batch_id: str) -> str:
        """Return the name of the key that made a batch; "" for a batch that is gone."""
        if batch_id not in self._owners and (stored := self.find_batch(batch_id)) is not None:
            self._owners[batch_id] = stored.owner
        return self._owners.get(batch_id, "")

    def list_batches(self, reach: str) -> list[StoredBatch]:
        """Return all batches for a client that reaches `reach`, the oldest first."""
        owned = [i for i in self.batch_ids() if reach in ("", self.owner_of(i))]
        found = [self.find_batch(batch_id, reach) for batch_id in owned]
        return [stored for stored in found if stored is not None]


DISK = web.AppKey("DISK", Disk)


def disk_of(request: web.Request) -> Disk:
    """Return the directory. Raises `UnknownBatchError` that says how to have one."""
    disk = request.app.get(DISK)
    if disk is None:
        raise UnknownBatchError(
            "this server keeps no files and runs no batches: start it with --batch-dir DIRECTORY"
        )
    return disk


def remove_folder(path: Path) -> None:
    """Delete a folder and the files in it."""
    for inside in path.iterdir():
        inside.unlink(missing_ok=True)
    path.rmdir()


# How much of the disk files and batches take, how much they may, and what is deleted with time.
# What blocks on the disk is for the threads of `Disk`.


MIB = 2**20
INCOMING = "incoming\0"  # no name of a key


def usage(disk: Disk) -> Counter[str]:
    """Return bytes by owner, those of uploads as `INCOMING`'s. A file counts as a MiB at least."""
    used: Counter[str] = Counter()
    for stored in disk.all_files():
        used[stored.owner] += max(stored.file.bytes, MIB)
    for batch_id in disk.batch_ids():
        folder = disk.folder(batch_id)
        sizes = [_size(folder / name) for name in ("output", "errors")]
        sizes.append(_size(folder / "input", of_its_own=True))
        used[disk.owner_of(batch_id)] += max(sum(sizes), MIB)
    for name in os.listdir(disk.incoming):
        used[INCOMING] += _size(disk.incoming / name)
    return used


def is_full(disk: Disk, used: Counter[str], owner: str, more: int = 0) -> bool:
    """Return whether there is more than there may be, in all or of that owner, with `more`
    bytes.
    """
    limit = disk.settings.max_batch_gib * 2**30
    share = limit * (disk.settings.max_batch_share if owner else 1)
    return used.total() + more > limit or used[owner] + more > share


async def check_room(disk: Disk, owner: str, more: int, of_these_here: int = 0) -> None:
    """Raises `RequestError` if `more` bytes are too many, in all or for that owner; `of_these_here`
    of those bytes lie in `incoming` already.
    """
    used = await disk.do(usage, disk)
    used[INCOMING] -= of_these_here
    if is_full(disk, used, owner, max(more, MIB)):
        raise RequestError(
            "there is no room for this: delete files that are no longer needed, or wait until they "
            "expire (--max-batch-gib, --max-batch-share)"
        )


def sweep(disk: Disk, now: float) -> None:
    """Delete what is older than it may be, and what uploads and crashes have left behind; `now` is
    in seconds since 1970.
    """
    for stored in disk.all_files():
        if stored.file.expires_at <= now:
            disk.remove_file(stored.file.id)
    old = now - disk.settings.batch_file_days * DAY
    for batch_id in disk.batch_ids():
        stored_batch = disk.find_batch(batch_id)
        if stored_batch is None or not stored_batch.batch.has_ended:
            continue
        if stored_batch.batch.created_at < old:
            remove_folder(disk.folder(batch_id))
        else:  # a crash may have left something
            disk.clear_batch(batch_id)
    names = set(os.listdir(disk.files))
    lost = [disk.files / n for n in names if not n.endswith(".json") and f"{n}.json" not in names]
    for path in (*disk.incoming.iterdir(), *lost):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ctime < now - DAY:  # else it may be on its way
                remove_folder(path) if path.is_dir() else path.unlink()


def _size(path: Path, *, of_its_own: bool = False) -> int:
    """Return bytes; 0 if it is not there or, where asked, if it has another name, by which it
    counts.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    return 0 if of_its_own and found.st_nlink > 1 else found.st_size
