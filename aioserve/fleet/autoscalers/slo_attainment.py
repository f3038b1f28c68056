"""As many replicas as are predicted to keep a share of requests within their time to first token.

Source: service levels as the objective of scaling, as in llm-d's autoscaler and PolyServe (2025).

Says: of the newest 500 requests of the last minute that came after the newest replica served, the
first tokens tell which part of its time a request used that was later than the stated share of
all. That part is predicted to grow with the load of a replica, so to fall with their number: the
least number at which it fits is wanted. While replicas start, none is asked for.

Simplified: a queue grows faster than in proportion, so that one replica at a time goes, and at most
twice as many are wanted as serve. A request without the hint `slo_ttft` is held to an option. Where
no such request has a first token, the number stays, or falls by one if no replica has requests.

Cost: O(500 log 500).
"""

import math
from collections import deque
from typing import Annotated, Any

from msgspec import Meta

from aioserve.fleet.routing import (
    AutoscalerInterface,
    AutoscalerOptions,
    FleetView,
    NonNegativeFloat,
    PositiveFloat,
    RoutedRequest,
)

NUM_KEPT = 500
MOST_GROWTH = 2.0  # times those that serve, while a queue says nothing of how many would be enough


class SloAttainment(AutoscalerInterface):
    """Scales by the predicted share of requests within their time to first token."""

    class Options(AutoscalerOptions):
        ttft: PositiveFloat = 1.0  # seconds, of a request that states none
        share: Annotated[float, Meta(gt=0, lt=1)] = 0.95  # of requests, within their time
        window: PositiveFloat = 60.0  # seconds for which a first token counts
        stable_seconds: NonNegativeFloat = 60.0  # for which fewer must have been enough

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: Times of arrivals, each with the part of its level that was used: 1 is all of it.
        self.used: deque[tuple[float, float]] = deque(maxlen=NUM_KEPT)
        self.num_serving = 0
        self.serving_since = 0.0  # time at which the newest replica was there first

    def on_first_token(self, request: RoutedRequest, seconds: float) -> None:
        used = seconds / (request.slo_ttft or self.options.ttft)
        self.used.append((request.arrival_time, used))

    def decide(self, fleet: FleetView) -> int:
        now = self.clock()
        if len(fleet.replicas) > self.num_serving:
            self.serving_since = now
        self.num_serving = len(fleet.replicas)
        since = max(self.serving_since, now - self.options.window)
        used = sorted(part for arrival, part in self.used if arrival >= since)
        enough = fleet.num_replicas
        if used:
            place = min(math.ceil(self.options.share * len(used)), len(used)) - 1
            enough = math.ceil(max(self.num_serving, 1) * min(used[place], MOST_GROWTH))
        elif not any(replica.num_requests for replica in fleet.replicas):
            enough = 0
        if fleet.num_starting:
            enough = min(enough, fleet.num_replicas)
        enough = max(enough, fleet.num_replicas - 1)
        return self.steady(enough, fleet, self.options.stable_seconds)
