"""A conversation stays at one replica, by consistent hashing (Karger et al., 1997).

Paper: Karger et al., "Consistent Hashing and Random Trees", STOC'97. When a replica goes, only its
own conversations move, and when it is back, they come back. A request without a session goes to the
replica with the least work. Cost: O(log n) of n replicas; O(n log n) after one came or went.
"""

from bisect import bisect
from hashlib import blake2b
from typing import Any

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest

# Points of a replica on the ring: the more, the more even are the shares. With 64 they differ by
# an eighth (one over the root of it).
POINTS = 64


class SessionSticky(BaseRouter):
    """Chooses the replica that owns the next point of the ring after the session's own."""

    keeps_sessions = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.points: dict[str, list[int]] = {}  # by replica
        self.ring: list[tuple[int, str]] = []  # sorted; empty: to be made
        self.places: dict[str, int] = {}  # where each replica stood the last time

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        if not request.session:
            return min(replicas, key=lambda replica: replica.work)
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
