"""As many replicas as keep the share of taken seats at a target (Kubernetes' HPA).

Source: Kubernetes, "Horizontal Pod Autoscaling": replicas x metric / target, rounded up, and no
change while the ratio is within a tolerance. Fewer only when that was enough for a while.

Simplified: the metric is the share of seats that requests have or wait for; what starts counts as
free seats.

Cost: O(n) of n replicas.
"""

import math
from typing import Annotated

from msgspec import Meta

from aioserve.fleet.routing import (
    AutoscalerInterface,
    AutoscalerOptions,
    FleetView,
    NonNegativeFloat,
    PositiveInt,
)


class TargetUtilization(AutoscalerInterface):
    """Scales by taken seats, down only after a while."""

    class Options(AutoscalerOptions):
        target: Annotated[float, Meta(gt=0, le=1)] = 0.6  # share of seats that are taken
        tolerance: NonNegativeFloat = 0.1  # of the ratio to the target, within which it stays
        stable_seconds: NonNegativeFloat = 60.0  # for which fewer must have been enough
        seats: PositiveInt | None = None  # of a replica that count (default: as reported)

    options: Options

    def decide(self, fleet: FleetView) -> int:
        current = fleet.num_replicas
        reported = [replica.max_num_seqs for replica in fleet.replicas if replica.max_num_seqs]
        seats = self.options.seats or max(reported, default=1)
        taken = sum(replica.num_requests for replica in fleet.replicas)
        ratio = taken / (seats * max(current, 1)) / self.options.target
        wanted = current if abs(ratio - 1) <= self.options.tolerance else math.ceil(current * ratio)
        return self.steady(wanted, fleet, self.options.stable_seconds)
