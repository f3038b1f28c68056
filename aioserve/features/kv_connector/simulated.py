"""Blocks outside the cache for the simulated runner: what is where and how long it takes, no bytes.

Knows rates and the loop's clock. What a step's copies cost, the runner adds to the step.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence

from aioserve.errors import ConfigError
from aioserve.features.kv_connector import BlockStore, KVConnectorWorker
from aioserve.kv_cache import KVConnectorMetadata


class SimulatedBlocks(KVConnectorWorker):
    """Slots of host memory that are counted alone."""

    def __init__(self, num_bytes: int, block_bytes: int, seconds_per_block: float) -> None:
        """A copy of a block takes so long. Raises `ConfigError` if there is no room for one."""
        self.block_bytes = block_bytes
        self.num_slots = num_bytes // block_bytes
        self.seconds_per_block = seconds_per_block
        self.seconds_of_step = 0.0  # that copies of the step add to it
        if not self.num_slots:
            raise ConfigError(
                f"cache.kv_connector_gib is {num_bytes:,} bytes, but a simulated block has "
                f"{block_bytes:,} (runner.simulated_kv_token_bytes)"
            )

    def transfer(self, metadata: KVConnectorMetadata) -> None:
        num_loads = len(metadata.loads)
        self.num_loaded += num_loads
        self.load_seconds += num_loads * self.seconds_per_block
        self.seconds_of_step = (num_loads + len(metadata.saves)) * self.seconds_per_block


class SimulatedDirectory(BlockStore):
    """A directory that knows which blocks are there; engines in one loop may share it. Reads of one
    engine come one after another, writes take no time.
    """

    def __init__(self, max_bytes: int, block_bytes: int, seconds_per_block: float) -> None:
        self._max_blocks = max_bytes // block_bytes
        self._block_bytes = block_bytes
        self._seconds_per_block = seconds_per_block
        self._contents: OrderedDict[bytes, None] = OrderedDict()  # wanted least recently first
        self._loop = asyncio.get_running_loop()
        self._busy_until = 0.0

    def shared(self) -> "SimulatedDirectory":
        """Return a directory of the same contents, for another engine."""
        other = SimulatedDirectory(0, self._block_bytes, self._seconds_per_block)
        other._max_blocks, other._contents = self._max_blocks, self._contents
        return other

    def find(self, block_hashes: Sequence[bytes], on_found: Callable[[int], None]) -> None:
        missing = (i for i, h in enumerate(block_hashes) if h not in self._contents)
        self._loop.call_soon(on_found, next(missing, len(block_hashes)))

    def find_each(
        self, block_hashes: Sequence[bytes], on_found: Callable[[frozenset[bytes]], None]
    ) -> None:
        found = frozenset(h for h in block_hashes if h in self._contents)
        self._loop.call_soon(on_found, found)

    def read(
        self, block_hashes: Sequence[bytes], slots: Sequence[int], on_read: Callable[[int], None]
    ) -> None:
        now, seconds = self._loop.time(), len(slots) * self._seconds_per_block
        for block_hash in block_hashes:
            if block_hash in self._contents:
                self._contents.move_to_end(block_hash)
        self._busy_until = max(self._busy_until, now) + seconds
        self.num_bytes_read += len(slots) * self._block_bytes
        self.read_seconds += seconds
        self._loop.call_at(self._busy_until, on_read, len(slots))

    def write(
        self, block_hashes: Sequence[bytes], slots: Sequence[int], on_written: Callable[[], None]
    ) -> None:
        for block_hash in block_hashes:
            self._contents[block_hash] = None
            self._contents.move_to_end(block_hash)
        self.num_bytes_written += len(slots) * self._block_bytes
        while len(self._contents) > self._max_blocks:
            self._contents.popitem(last=False)
        self._loop.call_soon(on_written)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        return self._loop.call_later(seconds, callback).cancel

    def seconds_to_read(self, num_bytes: int) -> float:
        wait = max(self._busy_until - self._loop.time(), 0.0)
        return wait + num_bytes / self._block_bytes * self._seconds_per_block

    async def change_weights(self, path: str) -> None:
        self._contents.clear()

    async def close(self) -> None:
        pass
