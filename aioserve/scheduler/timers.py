"""When requests are due: their deadlines, and how long they may wait to be served at all.

Knows times. What happens to a request that is due is the scheduler's business.
"""

from heapq import heappop, heappush

from aioserve.request import Request, RequestStatus


class Timers:
    """A heap of due times; the entry of a request that has ended stays until it is due."""

    def __init__(self, queue_timeout: float | None) -> None:
        """`queue_timeout`: seconds from arrival until a request that was never served is due."""
        self._queue_timeout = queue_timeout
        self._heap: list[tuple[float, int, Request, bool]] = []
        self._num_added = 0  # keeps the heap from comparing requests

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch the request's deadline, if it has one, and its time in the queue."""
        if request.deadline is not None:
            self._push(request.deadline, request, only_if_unserved=False)
        if self._queue_timeout is not None:
            due = request.arrival_time + self._queue_timeout
            self._push(due, request, only_if_unserved=True)

    def next_due(self) -> float | None:
        """When somebody is due who has not ended meanwhile; None: nobody is watched."""
        while self._heap:
            due, _, request, only_if_unserved = self._heap[0]
            if request.status is RequestStatus.WAITING or not (
                only_if_unserved or request.status.is_finished
            ):
                return due
            heappop(self._heap)
        return None

    def take_due(self, now: float) -> list[Request]:
        """Requests that are due, earliest first; an ended one is not: its id may be another's."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            _, _, request, only_if_unserved = heappop(self._heap)
            if request.status is RequestStatus.WAITING or not (
                only_if_unserved or request.status.is_finished
            ):
                due.append(request)
        return due

    def _push(self, due: float, request: Request, *, only_if_unserved: bool) -> None:
        self._num_added += 1
        heappush(self._heap, (due, self._num_added, request, only_if_unserved))
