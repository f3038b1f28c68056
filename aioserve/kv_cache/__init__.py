"""Block ids, reference counts and prefix hashes. No tensors: those belong to the runner.

Names are imported when they are asked for: a policy's file needs none of them. The kinds of cache
that few models need (states, sliding windows, encoder outputs) are loaded when a model or a request
needs them.
"""

from typing import TYPE_CHECKING

from aioserve.support import late_names

if TYPE_CHECKING:
    from aioserve.kv_cache.block_pool import (
        BLOCKS,
        HASH_BYTES,
        AllBlocksCleared,
        BlockNotes,
        BlockPool,
        BlockRemoved,
        BlockStored,
        ExternalPrefix,
        KVEvent,
        LeaseLimits,
        OffloadPrice,
    )
    from aioserve.kv_cache.connector import (
        Copies,
        KeptPool,
        KVConnectorBase,
        KVConnectorMetadata,
        KVConnectorStats,
        Outside,
        reached_blocks,
    )
    from aioserve.kv_cache.manager import (
        KVCacheManager,
    )
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

_MODULES = {
    "block_pool": (
        "BLOCKS",
        "HASH_BYTES",
        "AllBlocksCleared",
        "BlockNotes",
        "BlockPool",
        "BlockRemoved",
        "BlockStored",
        "ExternalPrefix",
        "KVEvent",
        "LeaseLimits",
        "OffloadPrice",
    ),
    "connector": (
        "Copies",
        "KeptPool",
        "KVConnectorBase",
        "KVConnectorMetadata",
        "KVConnectorStats",
        "Outside",
        "reached_blocks",
    ),
    "manager": ("KVCacheManager",),
    "resource": (
        "Ahead",
        "EncoderLimits",
        "Resource",
        "StatePool",
        "StateSlots",
        "WindowBlocks",
        "WindowPool",
        "WindowSpec",
        "make_limits",
        "make_resources",
    ),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

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
    "LeaseLimits",
    "OffloadPrice",
    "Outside",
    "Resource",
    "StatePool",
    "StateSlots",
    "WindowBlocks",
    "WindowPool",
    "WindowSpec",
    "make_limits",
    "make_resources",
    "reached_blocks",
]

__getattr__ = late_names(__name__, _HOMES)
