"""What a KV cache tells an observer: which content can be found here, and which no longer.

For routers that send a request where its prefix is, and for tests.
"""

import msgspec


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """A full block became findable; a step that is scheduled already computes it."""

    block_hash: bytes
    parent_hash: bytes | None  # of the block before it; None for the first
    token_ids: list[int]


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """A block was evicted, or will not be computed after all."""

    block_hash: bytes


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing can be found any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
