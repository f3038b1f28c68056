"""When requests are due: their deadlines, and how long they may wait to be served at all.

Knows times. What happens to a request that is due is the scheduler's business.
"""

from heapq import heapify, heappop, heappush

from aioserve.request import Request, RequestStatus

MIN_COMPACTED = 64  # entries; a heap of fewer is left as it is


class Timers:
    """A heap of due times by number, and the requests that the numbers stand for.

    A request that ends is forgotten at once, however far its deadline; its entries leave the heap
    when they are due, or when they are more than half of it.
    """

    def __init__(self, queue_timeout: float | None) -> None:
        """`queue_timeout`: seconds from arrival until a request that was never served is due."""
        self._queue_timeout = queue_timeout
        self._heap: list[tuple[float, int]] = []  # when, and the number of the timer
        self._watched: dict[int, tuple[Request, bool]] = {}  # by number; only if never served?
        self._numbers: dict[Request, list[int]] = {}  # of each request's timers
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch the request's deadline, if it has one, and its time in the queue."""
        if request.deadline is not None:
            self._push(request.deadline, request, only_if_unserved=False)
        if self._queue_timeout is not None:
            due = request.arrival_time + self._queue_timeout
            self._push(due, request, only_if_unserved=True)

    def forget(self, request: Request) -> None:
        """Drop the timers of a request that has ended."""
        for number in self._numbers.pop(request, ()):
            self._watched.pop(number, None)
        if len(self._heap) > max(2 * len(self._watched), MIN_COMPACTED):
            self._heap = [entry for entry in self._heap if entry[1] in self._watched]
            heapify(self._heap)

    def next_due(self) -> float | None:
        """When the next request is due; None: no request has a timer."""
        while self._heap:
            due, number = self._heap[0]
            if number in self._watched:
                request, only_if_unserved = self._watched[number]
                if not only_if_unserved or request.status is RequestStatus.WAITING:
                    return due
                del self._watched[number]
            heappop(self._heap)
        return None

    def take_due(self, now: float) -> list[Request]:
        """Requests that are due, earliest first, each once."""
        due: dict[Request, None] = {}
        while self._heap and self._heap[0][0] <= now:
            _, number = heappop(self._heap)
            if number in self._watched:
                request, only_if_unserved = self._watched.pop(number)
                if not only_if_unserved or request.status is RequestStatus.WAITING:
                    due[request] = None
        return list(due)

    def _push(self, due: float, request: Request, *, only_if_unserved: bool) -> None:
        self._num_added += 1
        self._watched[self._num_added] = (request, only_if_unserved)
        self._numbers.setdefault(request, []).append(self._num_added)
        heappush(self._heap, (due, self._num_added))
