"""Files and batches on disk: what is there, and whose it is.

The directory is all that is shared: by the API workers of a server, and with its next start. Blocks
on the disk, so it runs in threads of its own (`Disk.do`). Knows no request and no line of a batch.

    files/ID.json  files/ID             what is known of a file, and its bytes
    batches/ID/batch.json               the batch; while it runs, only its owner changes it
    batches/ID/input, output, errors    while it runs: its lines, and those that were answered
    batches/ID/counts.json, cancel      how far it is; and that a client wants it to end
    incoming/                           uploads that are not whole
    owner                               locked by the process that runs batches
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec

from aioserve.config import BatchConfig
from aioserve.errors import ConfigError
from aioserve.server.batches.stored import (
    StoredBatch,
    StoredFile,
    batches,
    encoder,
    files,
    is_id,
    read,
    sync_directory,
    write_whole,
)

P = ParamSpec("P")
T = TypeVar("T")

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
        """The path at which the bytes of the file are stored."""
        return self.files / file_id

    def find_file(self, file_id: str, reach: str) -> StoredFile | None:
        """None if no such file is kept for a client that reaches `reach`."""
        if not is_id(file_id, "file-"):
            return None
        stored = read(self.files / f"{file_id}.json", files)
        if stored is None or not stored.is_for(reach) or stored.file.expires_at <= time.time():
            return None
        return stored

    def list_files(self, reach: str) -> list[StoredFile]:
        """All files for a client that reaches `reach`, the oldest first."""
        now = time.time()
        return [s for s in self.all_files() if s.is_for(reach) and now < s.file.expires_at]

    def all_files(self) -> list[StoredFile]:
        """All files, the oldest first. Each is read once in a life of this process."""
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
        """The folder in which all of a batch is."""
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
        """The batch as it is now; None if a client that reaches `reach` has no such batch."""
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
        """The ids of all batches that are kept, the oldest first."""
        return sorted(name for name in os.listdir(self.batches) if is_id(name, "batch_"))

    def owner_of(self, batch_id: str) -> str:
        """The name of the key that made a batch; "" for a batch that is gone."""
        if batch_id not in self._owners and (stored := self.find_batch(batch_id)) is not None:
            self._owners[batch_id] = stored.owner
        return self._owners.get(batch_id, "")

    def list_batches(self, reach: str) -> list[StoredBatch]:
        """All batches for a client that reaches `reach`, the oldest first."""
        owned = [i for i in self.batch_ids() if reach in ("", self.owner_of(i))]
        found = [self.find_batch(batch_id, reach) for batch_id in owned]
        return [stored for stored in found if stored is not None]


def remove_folder(path: Path) -> None:
    """Delete a folder and the files in it."""
    for inside in path.iterdir():
        inside.unlink(missing_ok=True)
    path.rmdir()
