"""Block ids, reference counts and prefix hashes. No tensors: those belong to the runner.

The kinds of cache that few models need (states, sliding windows, encoder outputs) are loaded when a
model or a request needs them.
"""

import importlib
from typing import TYPE_CHECKING, Any

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
from aioserve.kv_cache.resource import AdapterSlots, EncoderLimits, LimitOf, Resource, WindowSpec
from aioserve.kv_cache.retention import Retention

if TYPE_CHECKING:
    from aioserve.features.multimodal.encoder_cache import Ahead
    from aioserve.features.states.slots import StatePool, StateSlots
    from aioserve.features.states.windows import WindowBlocks, WindowPool

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

_LOADED_LATER = {
    "Ahead": "aioserve.features.multimodal.encoder_cache",
    "StatePool": "aioserve.features.states.slots",
    "StateSlots": "aioserve.features.states.slots",
    "WindowBlocks": "aioserve.features.states.windows",
    "WindowPool": "aioserve.features.states.windows",
}


def __getattr__(name: str) -> Any:
    if name not in _LOADED_LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LOADED_LATER[name]), name)


def make_resources(
    num_state_slots: int | None,
    windows: WindowSpec | None,
    block_size: int,
    *,
    keeps_prefixes: bool = True,
) -> list[Resource]:
    """What a model needs of which each argument is not None: slots for states, window blocks.
    `block_size` is in tokens; with `keeps_prefixes`, what requests leave behind can be found.
    """
    resources: list[Resource] = []
    if num_state_slots is not None:
        from aioserve.features.states.slots import StatePool

        resources.append(StatePool(num_state_slots, block_size, keeps_snapshots=keeps_prefixes))
    if windows is not None:
        from aioserve.features.states.windows import WindowPool

        resources.append(WindowPool(windows, block_size, keeps_prefixes=keeps_prefixes))
    return resources


def make_limits(max_loras: int, encoder: EncoderLimits, pool: BlockPool) -> list[LimitOf]:
    """What settings of the scheduler limit, whatever the model: these come and go with policies."""

    def make_encoder() -> Resource:
        from aioserve.features.multimodal.encoder_cache import EncoderOutputs

        return EncoderOutputs(encoder, pool)

    return [
        LimitOf(lambda request: bool(request.adapter_id), lambda: AdapterSlots(max_loras)),
        LimitOf(lambda request: bool(request.encoder_inputs), make_encoder),
    ]
