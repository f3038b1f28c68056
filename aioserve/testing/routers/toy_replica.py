"""A replica that takes time and holds blocks, and computes nothing.

Knows seats, a queue and a cache of blocks. Knows no router. Times are in seconds.
"""

from collections import deque
from collections.abc import Iterator, Sequence

from aioserve.kv_cache.block_pool import BlockRemoved, BlockStored, KVEvent
from aioserve.routing import Assignment, ReplicaReport, RoutedRequest

NUM_SEATS = 8
NUM_BLOCKS = 400
SECONDS_PER_TOKEN = 0.001  # of a prompt that is not cached
SECONDS_PER_REPLY = 0.4


class Served:
    """A request at a replica."""

    __slots__ = ("assignment", "ends_at", "num_moves", "remaining", "request", "started_at")

    def __init__(self, request: RoutedRequest, assignment: Assignment) -> None:
        self.request = request
        self.assignment = assignment
        self.started_at = -1.0  # time of its first token, once it has a seat
        self.ends_at = -1.0
        self.num_moves = 0  # to other replicas
        self.remaining: float | None = None  # seconds of its reply, if it came from elsewhere


class ToyReplica:
    """Serves a prompt in proportion to what is not cached, then a reply, in a seat each."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: list[Served] = []
        self.queue: deque[Served] = deque()
        self.blocks: dict[bytes, None] = {}  # oldest first

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self.running) + len(self.queue)

    def seat(self, now: float) -> Iterator[KVEvent]:
        """Give free seats to requests that wait; what the cache says of it."""
        while self.queue and len(self.running) < NUM_SEATS:
            served = self.queue.popleft()
            request = served.request
            if served.remaining is not None:
                served.ends_at = now + served.remaining
                self.running.append(served)
                yield from self._hold(request.block_hashes)
                continue
            hashes = request.block_hashes
            num_cached = next(
                (i for i, h in enumerate(hashes) if h not in self.blocks), len(hashes)
            )
            tokens = request.num_tokens - num_cached * request.block_size
            served.started_at = now + SECONDS_PER_TOKEN * max(tokens, 1)
            served.ends_at = served.started_at + SECONDS_PER_REPLY
            self.running.append(served)
            yield from self._hold(hashes)

    def report(self) -> ReplicaReport:
        """What it says of itself."""
        num_tokens = sum(served.request.num_tokens for served in self.running)
        return ReplicaReport(
            num_running=len(self.running),
            num_waiting=len(self.queue),
            num_waiting_tokens=sum(served.request.num_tokens for served in self.queue),
            max_num_seqs=NUM_SEATS,
            num_kv_tokens=16 * NUM_BLOCKS,
            num_free_kv_tokens=max(16 * NUM_BLOCKS - num_tokens, 0),
            step_seconds=0.01 + 0.002 * len(self.running),
            step_base_seconds=0.01,
            step_request_seconds=0.002,
            num_evictable_kv_tokens=max(16 * len(self.blocks) - num_tokens, 0),
            adapters=tuple(sorted({served.request.adapter for served in self.running} - {""})),
        )

    def _hold(self, hashes: Sequence[bytes]) -> Iterator[KVEvent]:
        for block_hash in hashes:
            if block_hash in self.blocks:
                continue
            if len(self.blocks) >= NUM_BLOCKS:
                oldest = next(iter(self.blocks))
                del self.blocks[oldest]
                yield BlockRemoved(oldest)
            self.blocks[block_hash] = None
            yield BlockStored(block_hash, None, [])
