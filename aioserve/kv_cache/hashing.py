"""By what blocks are found: hashes of their contents and of all that is before them.

Knows tokens, salts, adapters and encoder inputs. The same in every process: files go by them.
"""

from bisect import bisect_right
from hashlib import blake2b
from itertools import takewhile
from operator import attrgetter
from struct import pack

from aioserve.request import Request

HASH_BYTES = 16
_end = attrgetter("end")


def hash_blocks(request: Request, num_blocks: int, size: int) -> None:
    """Extend `request.block_hashes` to `num_blocks` blocks of `size` tokens: each hash covers
    its block and, by chaining, all before.

    A cryptographic hash, since equal hashes share memory between strangers.
    """
    hashes = request.block_hashes
    start, end = len(hashes) * size, num_blocks * size
    if start >= end:
        return
    parent, encoder_inputs = hashes[-1] if hashes else _root(request), request.encoder_inputs
    data = pack(f"<{end - start}I", *request.token_ids[start:end])
    for offset in range(0, len(data), 4 * size):
        block = parent + data[offset : offset + 4 * size]
        if encoder_inputs:
            position = start + offset // 4
            block += _encoder_key(request, position, position + size)
        parent = blake2b(block).digest()[:HASH_BYTES]
        hashes.append(parent)


def _root(request: Request) -> bytes:
    """What must match besides tokens: salt and adapter; the length keeps them apart."""
    salt, adapter = request.cache_salt.encode(), request.adapter_id.encode()
    return blake2b(b"%d:%b%b" % (len(salt), salt, adapter)).digest()[:HASH_BYTES]


def _encoder_key(request: Request, start: int, end: int) -> bytes:
    """Contents of the encoder inputs that reach into tokens `start` to `end`, and where."""
    items = request.encoder_inputs  # in order; a video has many
    first = bisect_right(items, start, key=_end)
    reaching = takewhile(lambda item: item.position < end, items[first:])
    return b"".join(
        b"|%d:%b" % (item.position - start, item.content_hash.encode()) for item in reaching
    )
