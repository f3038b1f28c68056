"""Which requests to preempt so that a waiting request gets KV blocks, before any of them is.

Loaded when a request first finds no place. Knows requests and their blocks, no order.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice

from aioserve.kv_cache.block_pool import BlockPool
from aioserve.request import Request, RequestStatus, WaitReason

_HOLDING = (RequestStatus.RUNNING, RequestStatus.PAUSED)


class Vacancy:
    """The room that becomes free if some requests lose their places, and with them those that rely
    on what they were to compute in this step.
    """

    def __init__(
        self,
        pool: BlockPool,
        fresh_blocks: Mapping[int, Request],
        dependents: Mapping[Request, list[Request]],
    ) -> None:
        """Of the step: which request computes a block that can be found already, and which other
        requests rely on a request's work.
        """
        self._pool = pool
        self._fresh_blocks = fresh_blocks
        self._dependents = dependents
        self._num_references: dict[int, int] = {}  # by block: of requests that leave
        self.requests: dict[Request, int] = {}  # that leave, and how often each was named
        self._num_blocks = 0  # that no request holds any more

    def choose(self, displacing: Iterable[Request], find: Callable[[], object]) -> list[Request]:
        """Return the requests to preempt: as few from the front of `displacing` as give a waiting
        request its place, less those among them without which it has one as well; the last is
        spared first. Empty if nothing helps. `find` looks for the place, and returns a reason if
        there is none.
        """
        holding = (r for r in displacing if r.status in _HOLDING)
        chosen: list[Request] = []
        while more := list(islice(holding, len(chosen) or 1)):  # few questions, however many run
            for request in more:
                self._count(request, 1)
            chosen += more
            if not isinstance(find(), WaitReason):
                break
        else:
            return []
        needed = []
        for request in reversed(chosen):
            self._count(request, -1)
            if isinstance(find(), WaitReason):
                self._count(request, 1)
                needed.append(request)
        return needed[::-1]

    @property
    def num_seats(self) -> int:
        """How many of the requests that leave run."""
        return sum(request.status is RequestStatus.RUNNING for request in self.requests)

    def leave_found(self, block_ids: list[int]) -> list[int]:
        """Return the blocks of a cached prefix, up to the first that will not be computed after
        all.
        """
        for i, block_id in enumerate(block_ids):
            if self._fresh_blocks.get(block_id) in self.requests:
                return block_ids[:i]
        return block_ids

    def num_freed(self, kept: list[int]) -> int:
        """Return how many blocks no request holds any more, but for those of `kept`."""
        held, leaving = self._pool.ref_counts, self._num_references
        return self._num_blocks - sum(b in leaving and leaving[b] == held[b] for b in kept)

    def _count(self, request: Request, by: int) -> None:
        """One more request leaves, or stays after all, with those that rely on its work."""
        held, leaving = self._pool.ref_counts, self._num_references
        line = [request]
        for one in line:
            line += [
                dependent
                for dependent in self._dependents.get(one, ())
                if dependent not in line and dependent.status is RequestStatus.RUNNING
            ]
            num = self.requests.pop(one, 0) + by
            if num:
                self.requests[one] = num
            if num != max(by, 0):
                continue  # another request takes it along as well
            for block_id in one.block_ids:
                num = leaving.get(block_id, 0)
                leaving[block_id] = num + by
                self._num_blocks += (num + by == held[block_id]) - (num == held[block_id])
