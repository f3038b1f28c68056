"""As many replicas as are predicted to keep a share of requests within their time to first token.

Source: service levels as the objective of scaling, as in llm-d's autoscaler and PolyServe (2025).

Says: the newest 500 first tokens tell which part of its time a request used that was later than the
stated share of all. That part is predicted to grow with the load of a replica, so to fall with
their number: the least number at which it fits is wanted.

Simplified: a queue grows faster than in proportion, so that one replica at a time goes and any
number comes. A request without the hint `slo_ttft` is held to an option.

Cost: O(500 log 500).
"""

import math
from collections import deque
from typing import Annotated, Any

from msgspec import Meta

from aioserve.routing import (
    AutoscalerInterface,
    AutoscalerOptions,
    FleetView,
    NonNegativeFloat,
    PositiveFloat,
    RoutedRequest,
)

NUM_KEPT = 500


class SloAttainment(AutoscalerInterface):
    """Scales by the predicted share of requests within their time to first token."""

    class Options(AutoscalerOptions):
        ttft: PositiveFloat = 1.0  # seconds, of a request that states none
        share: Annotated[float, Meta(gt=0, lt=1)] = 0.95  # of requests, within their time
        stable_seconds: NonNegativeFloat = 60.0  # for which fewer must have been enough

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.used: deque[float] = deque(maxlen=NUM_KEPT)  # of each level: 1 is all of it

    def on_first_token(self, request: RoutedRequest, seconds: float) -> None:
        self.used.append(seconds / (request.slo_ttft or self.options.ttft))

    def decide(self, fleet: FleetView) -> int:
        wanted = fleet.num_replicas
        if self.used:
            used = sorted(self.used)
            place = min(math.ceil(self.options.share * len(used)), len(used)) - 1
            enough = math.ceil(max(len(fleet.replicas), 1) * used[place])
            wanted = max(enough, fleet.num_replicas - 1)
        return self.steady(wanted, fleet, self.options.stable_seconds)
