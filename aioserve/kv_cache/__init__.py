"""Block ids, reference counts and prefix hashes. No tensors: those belong to the runner.

The kinds of cache that few models need (states, sliding windows, encoder outputs) are loaded when a
model or a request needs them.
"""

from aioserve.kv_cache.block_pool import (
    HASH_BYTES,
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    KVEvent,
)
from aioserve.kv_cache.connector import (
    BLOCKS,
    BlockNotes,
    Copies,
    ExternalPrefix,
    KeptPool,
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorStats,
    OffloadPrice,
    Outside,
    reached_blocks,
)
from aioserve.kv_cache.manager import KVCacheManager, Vacancy, offload_price
from aioserve.kv_cache.resource import (
    Ahead,
    EncoderLimits,
    Resource,
    StatePool,
    StateSlots,
    WindowBlocks,
    WindowPool,
    WindowSpec,
    make_limits,
    make_resources,
)

__all__ = [
    "BLOCKS",
    "HASH_BYTES",
    "Ahead",
    "AllBlocksCleared",
    "BlockNotes",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "Copies",
    "EncoderLimits",
    "ExternalPrefix",
    "KVCacheManager",
    "KVConnectorBase",
    "KVConnectorMetadata",
    "KVConnectorStats",
    "KVEvent",
    "KeptPool",
    "OffloadPrice",
    "Outside",
    "Resource",
    "StatePool",
    "StateSlots",
    "Vacancy",
    "WindowBlocks",
    "WindowPool",
    "WindowSpec",
    "make_limits",
    "make_resources",
    "offload_price",
    "reached_blocks",
]
