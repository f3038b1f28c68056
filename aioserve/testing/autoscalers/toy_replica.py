"""A replica of a scaled toy fleet: seats, a queue, and requests that each keep a seat for a while.

Knows no autoscaler. Times are in seconds; nothing happens between two whole ones.
"""

from collections import deque

from aioserve.routing import ReplicaReport, RoutedRequest

NUM_SEATS = 8
SERVICE_SECONDS = 10  # that a request keeps its seat
PROMPT_TOKENS = 2048
KV_TOKENS = 10 * PROMPT_TOKENS
#: Seconds to a first token beside `n` requests that run: FIRST_TOKEN * (1 + n).
FIRST_TOKEN = 0.09


class Held:
    """A request at a replica."""

    __slots__ = ("ends_at", "request")

    def __init__(self, request: RoutedRequest) -> None:
        self.request = request
        self.ends_at = 0.0


class ScaledReplica:
    """Serves requests in the order in which they come, each in a seat."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: list[Held] = []
        self.queue: deque[RoutedRequest] = deque()
        self.is_leaving = False

    @property
    def num_requests(self) -> int:
        """Requests that run or wait."""
        return len(self.running) + len(self.queue)

    def tick(self, now: float) -> list[tuple[RoutedRequest, float]]:
        """End what is due and seat what waits; first tokens, each with the seconds since the
        request arrived.
        """
        self.running = [held for held in self.running if held.ends_at > now]
        started = []
        while self.queue and len(self.running) < NUM_SEATS:
            held = Held(self.queue.popleft())
            held.ends_at = now + SERVICE_SECONDS
            seconds = now - held.request.arrival_time + FIRST_TOKEN * (1 + len(self.running))
            self.running.append(held)
            started.append((held.request, seconds))
        return started

    def report(self) -> ReplicaReport:
        """What it says of itself."""
        held = sum(each.request.num_tokens for each in self.running)
        return ReplicaReport(
            num_running=len(self.running),
            num_waiting=len(self.queue),
            num_waiting_tokens=PROMPT_TOKENS * len(self.queue),
            max_num_seqs=NUM_SEATS,
            num_kv_tokens=KV_TOKENS,
            num_free_kv_tokens=max(KV_TOKENS - held, 0),
            step_seconds=0.02 + 0.002 * len(self.running),
        )
