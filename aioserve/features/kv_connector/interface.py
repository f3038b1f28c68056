"""What a KV connector stands on: copies in the runner, and a store outside this process.

Knows slots of host memory, which the scheduler's side gives out, and hashes; and what must be
equal for two engines to compute the same bytes of KV. Knows no requests.
"""

import glob
import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from aioserve.runner.interface import KVConnectorWorker

# All that decides about K and V: weights, configuration, code that comes along.
SUFFIXES = {".safetensors", ".gguf", ".bin", ".pt", ".json", ".py"}
_PART = re.compile(r"-\d{5}(-of-\d{5}\.gguf)$")  # ends the names of a GGUF model in several files
STRIDE, PIECE = 1 << 20, 4096  # bytes: of every `STRIDE`, the first `PIECE` are read


def fingerprint(path: Path) -> str:
    """Return a hash of a model's directory, file or files in parts: of names, sizes, times of
    change and a sample of the contents, so that it takes no second reading of all weights. A copy
    of the files may have another one.
    """
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in SUFFIXES and f.is_file())
    elif _PART.search(path.name):
        files = sorted(path.parent.glob(_PART.sub(r"-*\1", glob.escape(path.name))))
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.name}:{stat.st_size}:{stat.st_mtime_ns};".encode())
        with file.open("rb") as opened:
            for offset in range(0, stat.st_size, STRIDE):
                digest.update(os.pread(opened.fileno(), PIECE, offset))
    return digest.hexdigest()[:32]


class HostMemoryWorker(KVConnectorWorker, ABC):
    """One whose slots are bytes, which can be kept elsewhere."""

    #: What must be equal, besides the model and the block size, for a block to mean the same.
    layout: str

    @abstractmethod
    def memory(self, slot: int) -> memoryview:
        """Return the bytes of a slot that no transfer uses now. Slots count on from group
        to group.
        """


class BlockStore(ABC):
    """A store of blocks outside the memory of this process, by keys: the hash of a block, with the
    name of a pool behind it for what is no KV block. Slots count on from group to group. Calls come
    from the event loop, what is waited for happens elsewhere, and every callback comes on the loop,
    once, after the call.
    """

    num_failures: int = 0  # reads that were damaged or foreign, writes that failed
    read_seconds: float = 0.0  # that all reads took
    num_bytes_read: int = 0
    num_bytes_written: int = 0

    @abstractmethod
    def find(self, block_hashes: Sequence[bytes], on_found: Callable[[int], None]) -> None:
        """Report by `on_found` how many of these blocks are stored before the first missing one."""

    @abstractmethod
    def find_each(
        self, block_hashes: Sequence[bytes], on_found: Callable[[frozenset[bytes]], None]
    ) -> None:
        """Find which of these blocks are stored, and call `on_found` with them."""

    @abstractmethod
    def read(
        self, block_hashes: Sequence[bytes], slots: Sequence[int], on_read: Callable[[int], None]
    ) -> None:
        """Read each block into its slot; `on_read` is told how many could be read, from the first
        on. Until then no other transfer touches the slots.
        """

    @abstractmethod
    def write(
        self, block_hashes: Sequence[bytes], slots: Sequence[int], on_written: Callable[[], None]
    ) -> None:
        """Write each out of its slot, if it is not there; what cannot be written is dropped."""

    @abstractmethod
    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        """On the loop's clock; what is returned calls it off."""

    @abstractmethod
    def seconds_to_read(self, num_bytes: int) -> float:
        """Return the expected seconds, as measured so far; 0 if nothing is known."""

    @abstractmethod
    async def change_weights(self, path: str) -> None:
        """Serve the model at `path` from now on. What was asked before is still
        answered: reads are of the weights before, and writes for them.
        """

    @abstractmethod
    async def close(self) -> None:
        """Finish writes that were begun; reads are not answered any more. Idempotent."""
