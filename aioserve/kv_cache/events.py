"""What a KV cache tells an observer: which content can be found here, and which no longer.

For routers that send a request where its prefix is, and for tests.
"""

from collections.abc import Callable, Iterator

import msgspec

from aioserve.request import Request


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


def tell_stored(
    request: Request, first: int, end: int, block_size: int, lookup: Callable[[bytes], int | None]
) -> Iterator[BlockStored]:
    """Of blocks `first` to `end` of the request, which have hashes, those not there yet."""
    hashes = request.block_hashes
    for i in range(first, end):
        if lookup(hashes[i]) is None:
            tokens = request.token_ids[i * block_size : (i + 1) * block_size]
            yield BlockStored(hashes[i], hashes[i - 1] if i else None, tokens)
