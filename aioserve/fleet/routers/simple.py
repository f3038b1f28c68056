"""Routers of a few lines: in turn, by load, by session.

Each class says its source, what is simplified, and the cost of a decision for n replicas. Work is
in tokens, by the sender's own account: prompts until their first token, and half of what is held
while a reply is made. Requests are the true queues of replicas: what was sent and is not reported
yet counts, so that a crowd does not follow an old report.
"""

from bisect import bisect
from collections.abc import Callable
from hashlib import blake2b
from operator import attrgetter
from typing import Any

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest

work_of: Callable[[ReplicaView], float] = attrgetter("work")


# In turn, and by load.


class RoundRobin(BaseRouter):
    """A router that chooses one replica after the other, whatever they have to do. O(1)."""

    num_chosen = 0

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        self.num_chosen += 1
        return replicas[(self.num_chosen - 1) % len(replicas)]


class LeastRequests(BaseRouter):
    """A router that chooses the replica with the fewest requests, running or waiting, those of
    other senders included; of equals the one with the least work: what a load balancer calls least
    requests. O(n).
    """

    uses_reports = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        return min(replicas, key=lambda replica: (replica.num_requests, replica.work))


class LeastWork(BaseRouter):
    """A router that chooses the replica with the least work; of equals the first. It needs nothing
    that replicas report. O(n).
    """

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        return min(replicas, key=work_of)


class TwoChoices(BaseRouter):
    """A router that draws two replicas and chooses the one with less work; of equals the first
    drawn. O(1).

    Paper: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS, 2001.
    Two draws come close to the least of all, and several senders do not all rush to one replica.
    """

    @staticmethod
    def load_of(replica: ReplicaView) -> float:
        """Return what is compared of the two replicas."""
        return replica.work

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        if len(replicas) == 1:
            return replicas[0]
        first, second = self.rng.sample(range(len(replicas)), 2)
        return min(replicas[first], replicas[second], key=self.load_of)


class PowerOfTwo(TwoChoices):
    """A router that draws two replicas and chooses the one with fewer requests: the default of Ray
    Serve. O(1).

    Simplified: the two are not asked: their last reports are looked at, and what was sent since.
    """

    uses_reports = True

    @staticmethod
    def load_of(replica: ReplicaView) -> float:
        return replica.num_requests


# By session.


# Points of a replica on the ring: the more, the more even are the shares. With 64 they differ by
# an eighth (one over the root of it).
POINTS = 64


class SessionSticky(BaseRouter):
    """A router that chooses the replica that owns the next point of the ring after the session's
    own, so that a conversation stays at one replica. O(log n); O(n log n) after one came or went.

    Paper: Karger et al., "Consistent Hashing and Random Trees", STOC'97. When a replica goes, only
    its own conversations move, and when it is back, they come back. A request without a session
    goes to the replica with the least work.
    """

    keeps_sessions = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.points: dict[str, list[int]] = {}  # by replica
        self.ring: list[tuple[int, str]] = []  # sorted; empty: to be made
        self.places: dict[str, int] = {}  # where each replica stood the last time

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        if not request.session:
            return min(replicas, key=work_of)
        if not self.ring:
            self.ring = sorted((p, name) for name, own in self.points.items() for p in own)
        place = bisect(self.ring, (_point(request.session), "\U0010ffff"))
        for i in range(len(self.ring)):
            replica = self.shown(self.ring[(place + i) % len(self.ring)][1], replicas)
            if replica is not None:
                return replica
        raise AssertionError("no replica that is shown has joined")

    def shown(self, name: str, replicas: Replicas) -> ReplicaView | None:
        """Return the replica of this name, if it is among those that are shown. Where it stood the
        last time it stands again, unless a replica came or went.
        """
        place = self.places.get(name, -1)
        if not 0 <= place < len(replicas) or replicas[place].name != name:
            self.places = {replica.name: place for place, replica in enumerate(replicas)}
            place = self.places.get(name, -1)
        return replicas[place] if place >= 0 else None

    def on_join(self, name: str) -> None:
        self.points[name] = [_point(f"{name} {number}") for number in range(POINTS)]
        self.ring = []

    def on_leave(self, name: str) -> None:
        del self.points[name]
        self.ring = []


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
