"""The routers that there are, by name.

Knows work and prefixes. Does not know where either number comes from.
"""

import random
from bisect import bisect
from collections.abc import Iterable
from hashlib import blake2b

from aioserve.errors import ConfigError
from aioserve.kv_cache.events import KVEvent
from aioserve.nearest import did_you_mean
from aioserve.routing.interface import Choice, Replica, RoutedRequest, Router
from aioserve.routing.prefix_index import PrefixIndex

# Points of a replica on the ring: the more, the more even are the shares. With 64 they differ by
# an eighth (one over the root of it).
POINTS = 64


class RoundRobin(Router):
    """One after the other, whatever they have to do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._num_chosen = 0

    def choose(self, request: RoutedRequest, replicas: tuple[Replica, ...]) -> Choice:
        self._num_chosen += 1
        return Choice((self._num_chosen - 1) % len(replicas))


class LeastWork(Router):
    """The one with the least work; of equals the first."""

    def choose(self, request: RoutedRequest, replicas: tuple[Replica, ...]) -> Choice:
        return Choice(_least(replicas))


class TwoChoices(Router):
    """The one with less work of two that are drawn (Mitzenmacher, 2001): needs to know but two."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._rng = random.Random(f"{seed} router")

    def choose(self, request: RoutedRequest, replicas: tuple[Replica, ...]) -> Choice:
        if len(replicas) == 1:
            return Choice(0)
        first, second = self._rng.sample(range(len(replicas)), 2)
        return Choice(second if replicas[second].work < replicas[first].work else first)


class PrefixAware(Router):
    """The one that holds the longest prefix, unless that saves less than waiting there costs: then
    the one with the least work.
    """

    follows_kv_events = True

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.index = PrefixIndex()
        self._replicas: tuple[Replica, ...] = ()
        self._places: dict[str, int] = {}

    def choose(self, request: RoutedRequest, replicas: tuple[Replica, ...]) -> Choice:
        if replicas is not self._replicas:
            self._replicas = replicas
            self._places = {replica.name: i for i, replica in enumerate(replicas)}
        least = _least(replicas)
        hashes, size, places = request.block_hashes, request.block_size, self._places
        count, names = self.index.longest(hashes)
        holders = [places[name] for name in names if name in places]
        if not holders:
            return Choice(least)
        holder = min(holders, key=lambda place: (replicas[place].work, place))
        cached = self.index.num_blocks(replicas[least].name, hashes)
        saved = (count - cached) * size  # tokens that the holder need not compute, and `least` must
        if replicas[holder].work - replicas[least].work > saved:
            return Choice(least, cached * size)
        return Choice(holder, count * size)

    def on_kv_event(self, name: str, event: KVEvent) -> None:
        self.index.apply(name, event)

    def forget(self, name: str) -> None:
        self.index.forget(name)


class SessionSticky(Router):
    """A conversation stays where it began, by consistent hashing (Karger et al., 1997): when a
    replica goes, only its own move. Without a session the one with the least work.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._replicas: tuple[Replica, ...] = ()
        self._points: list[int] = []
        self._owners: list[int] = []

    def choose(self, request: RoutedRequest, replicas: tuple[Replica, ...]) -> Choice:
        if not request.session:
            return Choice(_least(replicas))
        if replicas is not self._replicas:
            self._replicas = replicas
            ring = sorted(_ring(replicas))
            self._points = [point for point, _ in ring]
            self._owners = [owner for _, owner in ring]
        place = bisect(self._points, _point(request.session))
        return Choice(self._owners[place % len(self._owners)])


#: By the names by which they are asked for.
ROUTERS: dict[str, type[Router]] = {
    "round_robin": RoundRobin,
    "least_work": LeastWork,
    "two_choices": TwoChoices,
    "prefix": PrefixAware,
    "session": SessionSticky,
}


def make_router(name: str, seed: int = 0) -> Router:
    """Raises `ConfigError` that lists the names that there are."""
    if name not in ROUTERS:
        raise ConfigError(
            f"unknown router {name!r}{did_you_mean(name, ROUTERS)}; available: {', '.join(ROUTERS)}"
        )
    return ROUTERS[name](seed)


def _least(replicas: tuple[Replica, ...]) -> int:
    works = [replica.work for replica in replicas]
    return works.index(min(works))


def _ring(replicas: tuple[Replica, ...]) -> Iterable[tuple[int, int]]:
    """Points with the place of the replica that they belong to."""
    for place, replica in enumerate(replicas):
        for number in range(POINTS):
            yield _point(f"{replica.name} {number}"), place


def _point(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
