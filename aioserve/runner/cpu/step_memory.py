"""What a step needs of the memory of the KV caches: the blocks that it writes to are there before.

Knows blocks, and what a step says of them.
"""

from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.cpu.attention import AttentionBackend
from aioserve.scheduler.output import SchedulerOutput


class StepMemory:
    """The memory of one backend. Used on the thread that computes."""

    def __init__(self, backend: AttentionBackend, block_size: int) -> None:
        self._memory, self._windows = backend.memory, backend.window_memory
        self._block_size = block_size
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

    def release(self) -> None:
        """Give back the memory of the KV cache while no request has blocks: steps take it again."""
        self._memory.release()
        if self._windows is not None:
            self._windows.release()
