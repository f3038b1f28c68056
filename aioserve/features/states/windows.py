"""Blocks for layers with a sliding window: what has fallen out of it is given back.

Those layers have a pool and block tables of their own, beside those of layers that see everything.
Knows positions, blocks and hashes; does not know what is in a block, nor which requests need one.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from aioserve.errors import InvariantError, RequestError
from aioserve.kv_cache.block_pool import BlockPool, hash_blocks
from aioserve.kv_cache.connector import KVConnectorBase, Outside, reached_blocks
from aioserve.kv_cache.resource import WindowBlocks, WindowPool, WindowSpec
from aioserve.request import Request, WaitReason


@dataclass(slots=True)
class _Held:
    """The window blocks that a running request has."""

    first: int  # blocks before this one have fallen out, or were never needed
    block_ids: list[int]  # from there on
    num_reserved: int  # it never holds more
    num_cached: int  # leading blocks that were made findable, or need not be
    due: int = -1  # once more tokens than these are computed, something is to be done
    is_new: bool = True  # the runner has not heard of it


class WindowBlockPool(WindowPool):
    """The KV blocks of sliding-window layers. A request reserves as many as it may hold, so that it
    never lacks one half-way; once its prompt is computed these are fewer.

    A step gives back what lies before the window of its first token: steps run in order, so no
    request writes there before the steps ahead have read it. A block given back can be found by its
    hash until it is evicted, the least recently used first.
    """

    plans_decodes = True

    def __init__(self, spec: WindowSpec, block_size: int, *, keeps_prefixes: bool = True) -> None:
        self.spec = spec
        self.max_drafts = spec.max_drafts
        self.pool = BlockPool(spec.num_blocks)
        self._block_size = block_size
        self._keeps_prefixes = keeps_prefixes
        self._num_decode_blocks = spec.num_decode_blocks(block_size)
        self._num_reserved = 0
        self._held: dict[Request, _Held] = {}
        self._outside: Outside | None = None  # what a KV connector has of these blocks

    # For a KV connector.

    def join(self, connector: KVConnectorBase) -> None:
        if (outside := connector.join(self)) is not None:
            self._outside = outside
            self.pool = BlockPool(self.spec.num_blocks, None, outside.notes)

    def lookup(self, block_hash: bytes) -> int | None:
        """Return the window block with this content; None if there is none."""
        return self.pool.lookup(block_hash)

    def needed(self, num_blocks: int) -> range:
        """A text goes on behind `num_blocks` blocks with the last window of these."""
        return range(self._first_seen(num_blocks * self._block_size), num_blocks)

    def forget_blocks(self, block_ids: Iterable[int]) -> None:
        """Make what these window blocks hold unfindable: it was not loaded after all."""
        self.pool.forget_blocks(block_ids)

    def _is_there(self, block_hash: bytes) -> bool:
        outside = self._outside
        is_here = self.pool.lookup(block_hash) is not None
        return is_here or (outside is not None and outside.has(block_hash))

    # For requests.

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the sliding-window pool."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Sliding-window blocks that running requests have not reserved."""
        return self.pool.num_blocks - self._num_reserved

    def num_needed_blocks(self, request: Request) -> int:
        """Sliding-window blocks that the request reserves if it is admitted now."""
        longest = request.max_total_tokens - 1
        return self.spec.num_request_blocks(request.num_tokens, longest, self._block_size)

    def num_reached_blocks(self, request: Request, num_blocks: int) -> int:
        """Behind how many of the request's first `num_blocks` blocks it could begin, at most: those
        in the window of the next token are there. Their hashes must be known. Changes nothing.
        """
        return reached_blocks(request.block_hashes, num_blocks, self.needed, self._is_there)

    def touch(self, request: Request, num_blocks: int) -> None:
        """Make the blocks needed to begin behind `num_blocks` blocks the last to be evicted."""
        block_ids = self._find(request, num_blocks)
        self.pool.touch(block_ids)
        self.pool.free(block_ids)

    def shortage(self, request: Request, gone: Collection[Request] = ()) -> WaitReason | None:
        if request in self._held:  # it was paused
            return None
        num_returned = sum(self._held[r].num_reserved for r in gone if r in self._held)
        is_short = self.num_needed_blocks(request) > self.num_free_blocks + num_returned
        return WaitReason.WINDOWS if is_short else None

    def check_alone(self, request: Request) -> None:
        longest = request.max_total_tokens - 1
        num = self.spec.num_request_blocks(longest, longest, self._block_size)
        if num > self.num_blocks:
            raise RequestError(
                f"prompt and output of up to {request.max_total_tokens} tokens need {num} blocks "
                f"for sliding windows, of which there are {self.num_blocks} "
                "(cache.num_window_blocks)",
                param="max_tokens" if request.pooling_params is None else "prompt",
            )

    def held(self) -> str:
        num = max(self._num_reserved, self.pool.num_used_blocks)
        return f"{num} blocks for windows" if num else ""

    def take(self, request: Request, num_blocks: int, num_shared_tokens: int) -> None:
        """Room for a request that begins behind its computed tokens, whose last window is in blocks
        or outside. Raises `InvariantError` if it is not free.
        """
        num_reserved = self.num_needed_blocks(request)
        if num_reserved > self.num_free_blocks:
            raise InvariantError(f"{request!r} is admitted, but its window does not fit")
        seen = self.needed(request.num_computed_tokens // self._block_size)
        block_ids = self._hold(request.block_hashes[seen.start : seen.stop])
        self._num_reserved += num_reserved
        self._held[request] = _Held(seen.start, block_ids, num_reserved, seen.stop)

    def _hold(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Return blocks with these contents, held from now on; those that are outside are
        loaded.
        """
        found = {h: block_id for h in block_hashes if (block_id := self.lookup(h)) is not None}
        self.pool.touch(found.values())
        missing = [block_hash for block_hash in block_hashes if block_hash not in found]
        if missing:
            if self._outside is None:
                raise InvariantError(f"{len(missing)} blocks of a window are nowhere")
            new_block_ids = self.pool.allocate(len(missing))
            for block_hash, block_id in zip(missing, new_block_ids, strict=True):
                self._outside.load(block_hash, block_id)
            self.pool.register(new_block_ids, missing)  # there before another request reads them
            found |= zip(missing, new_block_ids, strict=True)
        return [found[block_hash] for block_hash in block_hashes]

    def give_back(self, request: Request) -> None:
        """All that the request has, if it has any. What can be found still can."""
        if (held := self._held.pop(request, None)) is not None:
            self._num_reserved -= held.num_reserved
            self.pool.free(reversed(held.block_ids))

    def pause(self, request: Request) -> None:
        """The blocks stay; the runner is told of them anew."""
        held = self._held[request]
        held.is_new, held.due = True, -1

    def plan(self, tokens: dict[Request, int], step_id: int) -> dict[str, WindowBlocks]:
        """Return what the runner must be told of a step that computes `tokens` of each request, by
        id.

        Called once, when the step is final. What the step leaves can be found from the next
        one on: steps run in order.
        """
        told: dict[str, WindowBlocks] = {}
        for request, num_tokens in tokens.items():
            held = self._held[request]
            if request.num_computed_tokens > held.due:
                place, block_ids = self._move(request, held, num_tokens)
                if held.is_new:
                    place, block_ids = held.first, held.block_ids.copy()
                    held.is_new = False
                if block_ids:
                    told[request.request_id] = WindowBlocks(place, block_ids)
        return told

    def cache(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks of the first `num_tokens` tokens, known and computed, findable."""
        held, end = self._held[request], num_tokens // self._block_size
        begin = max(held.num_cached, held.first)
        if begin >= end or not self._keeps_prefixes:
            return
        hash_blocks(request, end, self._block_size)
        block_ids = held.block_ids[begin - held.first : end - held.first]
        self.pool.register(block_ids, request.block_hashes[begin:end])
        held.num_cached = end

    def stats(self) -> dict[str, int]:
        num_used = self.pool.num_used_blocks
        return {"num_window_blocks": self.num_blocks, "num_used_window_blocks": num_used}

    def forget(self, request: Request, block_hashes: Sequence[bytes]) -> None:
        self.pool.forget(block_hashes)

    def clear(self) -> None:
        self.pool.clear_index()

    def _move(self, request: Request, held: _Held, num_tokens: int) -> tuple[int, list[int]]:
        """Give back what this step does not read, get what it writes; returns the new blocks and
        the place of the first.
        """
        size, end = self._block_size, request.num_computed_tokens
        begin = end - num_tokens
        self.cache(request, min(begin, request.num_tokens))
        num_fallen = self._first_seen(begin) - held.first
        if num_fallen > 0:
            self.pool.free(held.block_ids[:num_fallen])
            del held.block_ids[:num_fallen]
            held.first += num_fallen
        if begin >= request.num_tokens - 1 and held.num_reserved > self._num_decode_blocks:
            self._num_reserved -= held.num_reserved - self._num_decode_blocks
            held.num_reserved = self._num_decode_blocks
        place = held.first + len(held.block_ids)
        num_new = -(-end // size) - place
        if len(held.block_ids) + num_new > held.num_reserved:
            raise InvariantError(
                f"{request!r} needs {len(held.block_ids) + num_new} blocks for its window, "
                f"{held.num_reserved} are reserved"
            )
        block_ids = self.pool.allocate(num_new) if num_new > 0 else []
        held.block_ids += block_ids
        self.cache(request, min(end, request.num_tokens))
        # Behind a prompt there is something to do only where a block is full.
        is_decoding = held.num_reserved <= self._num_decode_blocks
        held.due = (held.first + len(held.block_ids)) * size if is_decoding else end
        return place, block_ids

    def _find(self, request: Request, num_blocks: int) -> list[int]:
        """Return blocks that must be cached to begin behind `num_blocks` blocks."""
        seen = self.needed(num_blocks)
        found = map(self.pool.lookup, request.block_hashes[seen.start : seen.stop])
        return [block_id for block_id in found if block_id is not None]

    def _first_seen(self, num_computed: int) -> int:
        """First block that the token behind `num_tokens` tokens attends to."""
        return max(num_computed - self.spec.num_tokens + 1, 0) // self._block_size
