"""Routers with one planted bug each: what the contract must catch, and how it says so.

Every docstring names the bug; `CAUGHT_BY` holds what the message must say.
"""

import random
import time
from typing import Any

from aioserve.fleet.routers.simple import SessionSticky
from aioserve.fleet.routing import (
    Answer,
    BaseRouter,
    Migrate,
    Refuse,
    Replicas,
    ReplicaView,
    RoutedRequest,
    Split,
    Wait,
)

CAUGHT_BY: dict[type[BaseRouter], str] = {}  # a regular expression of the message


def caught_by(message: str) -> Any:
    """Register a broken router with what its violation says."""

    def register(broken: type[BaseRouter]) -> type[BaseRouter]:
        CAUGHT_BY[broken] = message
        return broken

    return register


def least(replicas: Replicas) -> ReplicaView:
    return min(replicas, key=lambda replica: replica.num_sent)


@caught_by(r"AlwaysFirst: .* holds \d+ requests .* flooded")
class AlwaysFirst(BaseRouter):
    """It never looks at the others."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return replicas[0]


@caught_by(r"LeavesOneOut: r9 was sent 0 of 1500")
class LeavesOneOut(BaseRouter):
    """An index that ends one too early."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return least(replicas[:-1] or replicas)


@caught_by(r"CollectsOnPrefix: .*r\d holds \d+ requests and r\d .* flooded")
class CollectsOnPrefix(BaseRouter):
    """It goes to the holder of the prefix, whatever it has to do."""

    uses_prefixes = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        _, names = self.prefixes.longest(request)
        return next((r for r in replicas if r.name in names[:1]), least(replicas))


@caught_by(r"Herds: .* flooded")
class Herds(BaseRouter):
    """It believes what is half a second old, and forgets what it has sent itself."""

    uses_reports = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return min(replicas, key=lambda replica: replica.num_running + replica.num_waiting)


@caught_by(r"r[27] was sent 0 of \d+ requests .* where r2 and r7 report nothing")
class ShunsTheSilent(BaseRouter):
    """A replica that has not reported is never chosen."""

    uses_reports = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return least(tuple(r for r in replicas if r.known_at >= 0) or replicas)


@caught_by(r"ChoosesNone raised ValueError.* in choose\(\)")
class ChoosesNone(BaseRouter):
    """It finds no replica when none has reported."""

    uses_reports = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        if all(replica.known_at < 0 for replica in replicas):
            return least(())
        return least(replicas)


@caught_by(r"NamesTheDead: choose\(\) must return one of the replicas .* ReplicaView\(name='r\d'")
class NamesTheDead(BaseRouter):
    """It keeps the view of a replica that has gone since."""

    kept: ReplicaView | None = None

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        if self.kept is None or len(replicas) > 4:
            self.kept = least(replicas)
        return self.kept


@caught_by(r"ForgetsToForget raised KeyError.* in on_join\(\)")
class ForgetsToForget(BaseRouter):
    """It expects each name once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.known: set[str] = set()

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return least(replicas)

    def on_join(self, name: str) -> None:
        if name in self.known:
            raise KeyError(name)
        self.known.add(name)


@caught_by(r"EndsAfterLeave raised KeyError.* in on_end\(\)")
class EndsAfterLeave(BaseRouter):
    """It has thrown away what it knew of a replica when the last requests of it end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ended: dict[str, int] = {}

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return least(replicas)

    def on_join(self, name: str) -> None:
        self.ended[name] = 0

    def on_leave(self, name: str) -> None:
        del self.ended[name]

    def on_end(self, request: RoutedRequest, name: str) -> None:
        self.ended[name] += 1


@caught_by(r"WaitsForEver: q\d+ waited for the router for a minute")
class WaitsForEver(BaseRouter):
    """It lets requests that have failed wait, for nothing."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return Wait(1.0) if request.num_attempts else least(replicas)


@caught_by(r"RefusesEver: an idle fleet of 5 replicas has not served any of six requests")
class RefusesEver(BaseRouter):
    """It counts what it has sent and never what has ended."""

    num_sent = 0

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        self.num_sent += 1
        return Refuse("the fleet is full") if self.num_sent > 500 else least(replicas)

    def on_join(self, name: str) -> None:
        self.num_sent += 20


@caught_by(r"DrawsLots: .*the router calls random\.\w+\(\)")
class DrawsLots(BaseRouter):
    """It draws from the dice of the process."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return random.choice(replicas)


@caught_by(r"ReadsClock: .*the router calls time\.monotonic\(\)")
class ReadsClock(BaseRouter):
    """It reads another clock than its own."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return least(replicas) if time.monotonic() else replicas[0]


@caught_by(r"RemembersAcrossRuns: the same events gave another answer about q\d+")
class RemembersAcrossRuns(BaseRouter):
    """What it counts is the class's, and so of all routers of the process."""

    counts: list[int] = []  # noqa: RUF012 - that is the bug

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        self.counts.append(1)
        return replicas[len(self.counts) * 7 // 3 % len(replicas)]


@caught_by(r"answer \d+ is r\d with PYTHONHASHSEED=2 and r\d with 1")
class WalksThroughSet(BaseRouter):
    """It takes the first of a set of names."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        fewest = min(replica.num_sent for replica in replicas)
        name = next(iter({r.name for r in replicas if r.num_sent == fewest}))
        return next(replica for replica in replicas if replica.name == name)


@caught_by(r"ReadsUnasked reads num_running, which nothing fills without `uses_reports = True`")
class ReadsUnasked(BaseRouter):
    """It reads what it has not asked for."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return min(replicas, key=lambda replica: (replica.num_running, replica.num_sent))


@caught_by(r"ReadsPrefixes reads prefixes, which nothing fills without `uses_prefixes = True`")
class ReadsPrefixes(BaseRouter):
    """It looks for prefixes and has not said so."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        cached = self.prefixes.by_name(request)
        return min(replicas, key=lambda r: (r.num_sent, -cached.get(r.name, 0)))


@caught_by(r"WritesHints has changed a request")
class WritesHints(BaseRouter):
    """It marks a request in its hints."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        request.hints["seen"] = True
        return least(replicas)


@caught_by(r"keeps_sessions is promised, and \d+ of 400 sessions have left .* after r4 has gone")
class HashesByCount(BaseRouter):
    """The place of a session depends on how many replicas there are."""

    keeps_sessions = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        number = sum(map(ord, request.session or request.request_id))
        return replicas[number % len(replicas)]


@caught_by(r"keeps_sessions is promised, and \d+ .* after no replica came or went")
class SticksToWork(SessionSticky):
    """It promises sessions and goes by turns."""

    num_asked = 0

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        self.num_asked += 1
        if self.num_asked > 1200 and request.session:
            return replicas[self.num_asked % len(replicas)]
        return super().choose(request, replicas)


@caught_by(r"ComparesPairs: a decision runs [\d,]+ lines with 1,000 replicas")
class ComparesPairs(BaseRouter):
    """It compares each replica with each."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        wins = [sum(1 for b in replicas if a.work > b.work) for a in replicas[:300]]
        return replicas[wins.index(min(wins))]


@caught_by(r"KeepsSessions: self\.homes grows with requests that have ended")
class KeepsSessions(BaseRouter):
    """It remembers the replica of every session that ever was."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.homes: dict[str, str] = {}

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        chosen = least(replicas)
        self.homes[request.session] = chosen.name
        return chosen


class KnowsWhere(BaseRouter):
    """What the routers have in common that move requests: which request runs where."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.where: dict[str, str] = {}

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return least(replicas)

    def on_first_token(self, request: RoutedRequest, name: str, seconds: float) -> None:
        self.where[request.request_id] = name

    def on_move(self, request: RoutedRequest, source: str, target: str) -> None:
        self.where[request.request_id] = target

    def on_end(self, request: RoutedRequest, name: str) -> None:
        self.where.pop(request.request_id, None)


@caught_by(r"MovesToAndFro: a request that runs for half a second has moved \d+ times")
class MovesToAndFro(KnowsWhere):
    """It moves every request at every turn."""

    rebalance_seconds = 0.03

    def rebalance(self, replicas: Replicas) -> list[Migrate]:
        others = {r.name: replicas[i - 1] for i, r in enumerate(replicas)}
        return [Migrate(i, others[name]) for i, name in self.where.items() if name in others]


@caught_by(r"MovesAllToOne: .* holds \d+ requests .* flooded")
class MovesAllToOne(KnowsWhere):
    """It moves every request to the first replica."""

    rebalance_seconds = 0.1

    def rebalance(self, replicas: Replicas) -> list[Migrate]:
        return [Migrate(i, replicas[0]) for i, name in self.where.items()]


@caught_by(r"SplitsUnasked: choose\(\) must return .* Refuse or Wait; got Split")
class SplitsUnasked(BaseRouter):
    """It answers Split and does not state it."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return Split(least(replicas), replicas[-1])


@caught_by(r"SplitsToTheDead: choose\(\) must return .*; got Split")
class SplitsToTheDead(BaseRouter):
    """It remembers the replica for replies, which may have died."""

    splits = True
    decode: ReplicaView | None = None

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        self.decode = self.decode or replicas[-1]
        return Split(least(replicas), self.decode)


@caught_by(r"PromisesSplits: splits is stated, and none of \d+ requests")
class PromisesSplits(BaseRouter):
    """It states what it never does, and no live fleet takes it."""

    splits = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        return least(replicas)
