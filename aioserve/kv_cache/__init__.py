"""Block ids, reference counts and prefix hashes. No tensors: those belong to the runner."""

from aioserve.kv_cache.block_pool import BlockPool
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
from aioserve.kv_cache.encoding_ahead import Ahead
from aioserve.kv_cache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from aioserve.kv_cache.hashing import HASH_BYTES
from aioserve.kv_cache.manager import KVCacheManager
from aioserve.kv_cache.offload import offload_price
from aioserve.kv_cache.resources import make_limits, make_resources
from aioserve.kv_cache.resources.base import Resource
from aioserve.kv_cache.resources.encoder import EncoderLimits
from aioserve.kv_cache.resources.states import StatePool, StateSlots
from aioserve.kv_cache.resources.windows import WindowBlocks, WindowPool, WindowSpec
from aioserve.kv_cache.retention import Retention
from aioserve.kv_cache.vacancy import Vacancy

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
    "Retention",
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
