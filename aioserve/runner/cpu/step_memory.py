"""What a step needs of the memory of the KV caches: blocks to write to, and copies of blocks.

The blocks are there before the step writes to them; copies go from and to host memory. Knows
blocks, and what a step says of them.
"""

from aioserve.kv_cache import KVConnectorMetadata
from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.cpu.attention import AttentionBackend
from aioserve.runner.host_blocks import HostBlocks, SharedSlots
from aioserve.runner.served_model import ServedModel
from aioserve.scheduler.output import SchedulerOutput


class StepMemory:
    """The memory of one backend. Used on the thread that computes."""

    def __init__(self, backend: AttentionBackend, block_size: int, model: ServedModel) -> None:
        self._memory, self._windows = backend.memory, backend.window_memory
        self._block_size = block_size
        self._computed = f"{model.name}, {model.kv_cache_spec.dtype}, {backend.description}"
        self._host_blocks: HostBlocks | None = None
        self._memory.commit(0)  # a first step finds its blocks in memory, too
        if self._windows is not None:
            self._windows.commit(0)

    def commit(self, inputs: StepInputs, step: SchedulerOutput) -> None:
        """Have in memory what the step writes, and soon what was given with it. Raises
        `MemoryError`.
        """
        num_written = int(inputs.slot_mapping.max()) // self._block_size + 1
        self._memory.commit(num_written, soon=step.highest_new_block + 1)
        if inputs.windows is not None and self._windows is not None:
            num_written = int(inputs.windows.slot_mapping.max()) // self._block_size + 1
            self._windows.commit(num_written)

    def transfer(self, transfers: KVConnectorMetadata) -> None:
        """Copy what a KV connector wants copied before a step."""
        assert self._host_blocks is not None, "there is a connector"
        self._memory.commit(1 + max((block for _, block in transfers.loads), default=-1))
        self._host_blocks.transfer(transfers)

    def release(self) -> None:
        """Give back the memory of the KV cache while no request has blocks: steps take it again."""
        self._memory.release()
        if self._windows is not None:
            self._windows.release()

    def make_host_blocks(self, num_bytes: int, shared: SharedSlots | None = None) -> HostBlocks:
        """Make room for blocks in host memory, of at most `num_bytes`. Raises `ConfigError`."""
        caches = [*self._memory.key_caches, *self._memory.value_caches]
        self._host_blocks = HostBlocks(caches, num_bytes, self._computed, shared)
        return self._host_blocks

    def take_host_blocks(self, blocks: HostBlocks) -> None:
        """Go on with blocks in host memory that were made beside caches of the same sizes."""
        blocks.attach([*self._memory.key_caches, *self._memory.value_caches])
        self._host_blocks = blocks

    def close(self) -> None:
        """Let go of blocks in host memory. Idempotent."""
        if self._host_blocks is not None:
            self._host_blocks.close()
