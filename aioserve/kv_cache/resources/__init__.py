"""What requests hold besides KV blocks: the seam in `base`, and the kinds that there are."""

from aioserve.kv_cache.block_pool import BlockPool
from aioserve.kv_cache.resources.adapters import AdapterSlots
from aioserve.kv_cache.resources.base import Resource
from aioserve.kv_cache.resources.encoder import EncoderLimits, EncoderOutputs
from aioserve.kv_cache.resources.states import StatePool
from aioserve.kv_cache.resources.windows import WindowPool, WindowSpec


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
        resources.append(StatePool(num_state_slots, block_size, keeps_snapshots=keeps_prefixes))
    if windows is not None:
        resources.append(WindowPool(windows, block_size, keeps_prefixes=keeps_prefixes))
    return resources


def make_limits(max_loras: int, encoder: EncoderLimits, pool: BlockPool) -> list[Resource]:
    """What settings of the scheduler limit, whatever the model: these come and go with policies."""
    return [AdapterSlots(max_loras), EncoderOutputs(encoder, pool)]
