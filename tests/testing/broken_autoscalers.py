"""Autoscalers with one planted bug each: what the contract must catch, and how it says so.

Every docstring names the bug; `CAUGHT_BY` holds what the message must say.
"""

import math
import random
import time
from typing import Any

from aioserve.fleet.routing import AutoscalerInterface, FleetView, RoutedRequest

CAUGHT_BY: dict[type[AutoscalerInterface], str] = {}  # a regular expression of the message


def caught_by(message: str) -> Any:
    """Register a broken autoscaler with what its violation says."""

    def register(broken: type[AutoscalerInterface]) -> type[AutoscalerInterface]:
        CAUGHT_BY[broken] = message
        return broken

    return register


def needed(fleet: FleetView, requests: int = 5) -> int:
    """Replicas for all requests that are there."""
    return math.ceil(sum(replica.num_requests for replica in fleet.replicas) / requests)


@caught_by(r"Fraction: decide\(\) must return a whole number .* returned \d+\.\d+")
class Fraction(AutoscalerInterface):
    """It forgets to round up."""

    def decide(self, fleet: FleetView) -> int:
        return max(needed(fleet), fleet.num_replicas) / 2  # type: ignore[return-value]


@caught_by(r"Difference: .* returned -\d+")
class Difference(AutoscalerInterface):
    """It answers how many are missing, not how many there should be."""

    def decide(self, fleet: FleetView) -> int:
        return needed(fleet) - fleet.num_replicas


@caught_by(r"DividesByNone raised ZeroDivisionError")
class DividesByNone(AutoscalerInterface):
    """It divides by the replicas that serve, of which there may be none."""

    def decide(self, fleet: FleetView) -> int:
        held = sum(replica.num_requests for replica in fleet.replicas)
        full = held / (8 * len(fleet.replicas))
        return self.steady(math.ceil(fleet.num_replicas * full / 0.6), fleet, 60.0)


@caught_by(r"Flaps: .* changes its direction \d+ times in an hour of a steady load")
class Flaps(AutoscalerInterface):
    """It follows each arrival, up and down."""

    def decide(self, fleet: FleetView) -> int:
        return needed(fleet)


@caught_by(r"CountsNoStarts: two full replicas have \d+ as the first answer and \d+ ")
class CountsNoStarts(AutoscalerInterface):
    """It asks for one more each time, whatever starts."""

    def decide(self, fleet: FleetView) -> int:
        is_full = needed(fleet, 8) > len(fleet.replicas)
        return self.steady(fleet.num_replicas + is_full - (not is_full), fleet, 30.0)


@caught_by(r"StopsWhileOthersStart: .* stops a full replica before another serves")
class StopsWhileOthersStart(AutoscalerInterface):
    """It takes what starts off what it wants, as if it served already."""

    def decide(self, fleet: FleetView) -> int:
        return self.steady(needed(fleet) - fleet.num_starting, fleet, 0.0)


@caught_by(r"NeverGrows: \d+ of \d+ requests have their first token after more than 10 s")
class NeverGrows(AutoscalerInterface):
    """It lets the number stay."""

    def decide(self, fleet: FleetView) -> int:
        return fleet.min_replicas


@caught_by(r"WindsUp: .* the load ended at 660 s, and the least is 2")
class WindsUp(AutoscalerInterface):
    """Its own number goes on rising above the most, and takes as long to come down."""

    number = 1

    def decide(self, fleet: FleetView) -> int:
        wanted = needed(fleet)
        if wanted >= self.number:
            self.number += wanted
        elif wanted < self.number / 3:
            self.number -= 1
        return self.number


@caught_by(r"NeverShrinks: .* the load ended at 660 s")
class NeverShrinks(AutoscalerInterface):
    """It keeps every replica that it ever had."""

    def decide(self, fleet: FleetView) -> int:
        return max(needed(fleet), fleet.num_replicas)


@caught_by(r"PaysForAll: .* replica-hours are paid for in 2 hours")
class PaysForAll(AutoscalerInterface):
    """It keeps what was wanted in the last half hour."""

    def decide(self, fleet: FleetView) -> int:
        return self.steady(needed(fleet), fleet, 1500.0)


@caught_by(r"TrustsReports: .*replicas that report nothing")
class TrustsReports(AutoscalerInterface):
    """It takes a replica that reports nothing for an idle one."""

    def decide(self, fleet: FleetView) -> int:
        held = sum(replica.num_running + replica.num_waiting for replica in fleet.replicas)
        return self.steady(math.ceil(held / 5), fleet, 60.0)


@caught_by(r"NeedsAReport: .*min\(\)|NeedsAReport raised")
class NeedsAReport(AutoscalerInterface):
    """It divides by what is not reported."""

    def decide(self, fleet: FleetView) -> int:
        shares = [r.num_requests / r.max_num_seqs for r in fleet.replicas]
        return self.steady(math.ceil(sum(shares) / 0.6), fleet, 60.0)


@caught_by(r"ReplacesNone: .*")
class ReplacesNone(AutoscalerInterface):
    """It counts those that it has started, and not those that live."""

    started = 1

    def decide(self, fleet: FleetView) -> int:
        wanted = needed(fleet)
        if wanted > self.started:
            self.started = wanted
            return wanted
        return fleet.num_replicas if wanted * 3 > self.started else fleet.min_replicas


@caught_by(r"the autoscaler calls time\.monotonic\(\)")
class ReadsTheTime(AutoscalerInterface):
    """It reads the clock of the machine."""

    last = 0.0

    def decide(self, fleet: FleetView) -> int:
        self.last = time.monotonic()
        return self.steady(needed(fleet), fleet, 60.0)


@caught_by(r"the autoscaler calls random\.random\(\)|another answer")
class Gambles(AutoscalerInterface):
    """It rounds by chance, which no run repeats."""

    def decide(self, fleet: FleetView) -> int:
        return self.steady(needed(fleet) + (random.random() < 0.5), fleet, 60.0)


@caught_by(r"WalksThroughASet: answer \d+ is .* PYTHONHASHSEED")
class WalksThroughASet(AutoscalerInterface):
    """The first of a set of names is another one in each process."""

    def decide(self, fleet: FleetView) -> int:
        names = {replica.name for replica in fleet.replicas}
        first = next(iter(names), "r0")
        return self.steady(needed(fleet) + int(first[1:]) % 2, fleet, 60.0)


@caught_by(r"ComparesEachPair: an answer runs [\d,]+ lines with 1,000 replicas")
class ComparesEachPair(AutoscalerInterface):
    """It looks at all replicas for each replica."""

    def decide(self, fleet: FleetView) -> int:
        idle = 0
        for one in fleet.replicas:
            for other in fleet.replicas:
                idle += one.num_requests < other.num_requests
        return self.steady(needed(fleet), fleet, 60.0)


@caught_by(r"KeepsAll: self\.heard grows with requests that have ended")
class KeepsAll(AutoscalerInterface):
    """It keeps a time for each request that ever was."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heard: list[float] = []

    def on_first_token(self, request: RoutedRequest, seconds: float) -> None:
        self.heard.append(seconds)

    def decide(self, fleet: FleetView) -> int:
        return self.steady(needed(fleet), fleet, 60.0)
