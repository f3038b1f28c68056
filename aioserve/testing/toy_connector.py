"""A KV connector made of dictionaries: slots of host memory, and a store that takes its time.

Contents are what `ToyRunner` writes into its blocks. Knows no requests and checks nothing: what was
copied to the wrong place is found by the request that reads it.
"""

from collections import deque
from collections.abc import Callable, Sequence

from aioserve.kv_cache import BLOCKS, KVConnectorMetadata, StatePool, WindowPool
from aioserve.kv_connector import BlockStore, KVConnectorWorker, SlotGroup

Content = list[int | None]


class ToyWorker(KVConnectorWorker):
    """Copies between what a `ToyRunner` has, pool by pool, and its slots."""

    block_bytes = 1
    _NAMES = (BLOCKS, WindowPool.name, StatePool.name)  # of pools that there may be

    def __init__(self, num_slots: int) -> None:
        """As many slots for each pool."""
        self.num_slots = num_slots
        self.pools: dict[str, list[Content]] = {}  # those of the runner, once there is one
        self.contents: list[Content] = [[] for _ in range(num_slots * len(self._NAMES))]

    @property
    def groups(self) -> list[SlotGroup]:
        return [SlotGroup(name, self.num_slots, self.block_bytes) for name in self._NAMES]

    def transfer(self, metadata: KVConnectorMetadata) -> None:
        for name, (saves, _) in metadata.by_pool.items():
            first = self._NAMES.index(name) * self.num_slots
            for block_id, slot in saves:
                self.contents[first + slot] = self.pools[name][block_id].copy()
        for name, (_, loads) in metadata.by_pool.items():
            first = self._NAMES.index(name) * self.num_slots
            for slot, block_id in loads:
                block = self.pools[name][block_id]  # empty: nothing was ever copied there
                block[:] = self.contents[first + slot] or [None] * len(block)


class ToyStore(BlockStore):
    """Answers when it is told to, in the order of the questions; reads may fail half-way."""

    def __init__(self, worker: ToyWorker) -> None:
        self._worker = worker
        self._contents: dict[bytes, Content] = {}
        self._pending: deque[Callable[[bool], None]] = deque()  # told whether it fails

    def __len__(self) -> int:
        """The number of questions that wait for an answer."""
        return len(self._pending)

    def answer(self, fails: bool = False) -> None:
        """Do what was asked first."""
        if self._pending:
            self._pending.popleft()(fails)

    def find(self, block_hashes: Sequence[bytes], on_found: Callable[[int], None]) -> None:
        def find(fails: bool) -> None:
            known = (i for i, h in enumerate(block_hashes) if h not in self._contents)
            on_found(0 if fails else next(known, len(block_hashes)))

        self._pending.append(find)

    def find_each(
        self, block_hashes: Sequence[bytes], on_found: Callable[[frozenset[bytes]], None]
    ) -> None:
        def find(fails: bool) -> None:
            on_found(frozenset(() if fails else (h for h in block_hashes if h in self._contents)))

        self._pending.append(find)

    def read(
        self, block_hashes: Sequence[bytes], slots: Sequence[int], on_read: Callable[[int], None]
    ) -> None:
        def read(fails: bool) -> None:
            num_read = len(slots) // 2 if fails else len(slots)
            for i, slot in enumerate(slots):  # what failed has overwritten its slot as well
                content = self._contents[block_hashes[i]] if i < num_read else []
                self._worker.contents[slot] = content.copy()
            on_read(num_read)

        self._pending.append(read)

    def write(
        self, block_hashes: Sequence[bytes], slots: Sequence[int], on_written: Callable[[], None]
    ) -> None:
        def write(fails: bool) -> None:
            for block_hash, slot in zip(block_hashes, slots, strict=True):
                if not fails:
                    self._contents[block_hash] = self._worker.contents[slot].copy()
            on_written()

        self._pending.append(write)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None  # no request waits so long: answers come, if with a failure

    def seconds_to_read(self, num_bytes: int) -> float:
        return 0.0

    async def change_weights(self, path: str) -> None:
        self._contents.clear()

    async def close(self) -> None:
        while self._pending:
            self.answer()
