"""What a KV connector keeps of a model on the CPU, pool by pool, and its copies in host memory.

Knows which tensors belong to the blocks of a pool. Knows no hashes, and not which step wants what.
"""

from collections.abc import Sequence

from torch import Tensor

from aioserve.features.kv_connector.host_blocks import HostBlocks, KeptTensors, SharedSlots
from aioserve.features.states.cpu_steps import describe_steps
from aioserve.kv_cache import BLOCKS, KVConnectorMetadata, StatePool, WindowPool
from aioserve.runner.batch.drafter import Drafter
from aioserve.runner.cpu.kv_memory import AttentionBackend, KVMemory
from aioserve.runner.interface import TYPICAL_TOKENS
from aioserve.runner.served_model import ServedModel

#: States that are kept where the KV blocks of `TYPICAL_TOKENS` tokens are: that at the end of a
#: prompt, and that at the end of its reply. A guess.
NUM_STATES = 2


class HostCopies:
    """The copies of one backend's blocks, its model's states and its drafter's blocks, once a
    connector wants some. Used on the thread that computes.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        model: ServedModel,
        drafter: Drafter | None,
        block_size: int,
    ) -> None:
        of_drafter: Sequence[Tensor] = ()
        if drafter is not None:
            of_drafter = drafter.kept
            if drafter.noted is not None:
                of_drafter = (*of_drafter, drafter.noted)
        self._kept = kept_tensors(backend, model, of_drafter, block_size)
        computed = [f"{model.name}, {model.kv_cache_spec.dtype}, {backend.description}"]
        if model.states is not None:
            computed.append(describe_steps())
        self._computed = "; ".join(computed)
        self._blocks: HostBlocks | None = None

    @property
    def bytes_of_first(self) -> dict[str, int]:
        """Bytes of a block that the first of several ranks has beside the others, by the pool."""
        return {kept.name: kept.num_bytes_of_first for kept in self._kept}

    def make(self, num_bytes: int, shared: SharedSlots | None = None) -> HostBlocks:
        """Make room for blocks in host memory, of at most `num_bytes`. Raises `ConfigError`."""
        self._blocks = HostBlocks(self._kept, num_bytes, self._computed, shared)
        return self._blocks

    def take(self, blocks: HostBlocks) -> None:
        """Go on with blocks in host memory that were made beside caches of the same sizes."""
        blocks.attach(self._kept)
        self._blocks = blocks

    def transfer(self, transfers: KVConnectorMetadata) -> None:
        """Copy what a KV connector wants copied before a step."""
        assert self._blocks is not None, "there is a connector"
        self._blocks.transfer(transfers)

    def close(self) -> None:
        """Let go of blocks in host memory, and of all tensors. Idempotent."""
        self._kept = []
        if self._blocks is not None:
            self._blocks.close()


def kept_tensors(
    backend: AttentionBackend, model: ServedModel, of_drafter: Sequence[Tensor], block_size: int
) -> list[KeptTensors]:
    """Return the tensors of each pool. What a drafter has of the KV blocks, which is on the first
    of several ranks, is kept with them.
    """
    num_blocks = -(-TYPICAL_TOKENS // block_size)
    pools = [_blocks(BLOCKS, backend.memory, num_blocks, of_drafter)]
    if backend.window_memory is not None:
        pools.append(_blocks(WindowPool.name, backend.window_memory, num_blocks))
    if model.states is not None:
        pools.append(KeptTensors(StatePool.name, model.states.tensors, NUM_STATES))
    return pools


def _blocks(
    name: str, memory: KVMemory, weight: int, of_drafter: Sequence[Tensor] = ()
) -> KeptTensors:
    caches = [*memory.key_caches, *memory.value_caches]
    return KeptTensors(name, caches, weight, of_drafter, memory.commit)
