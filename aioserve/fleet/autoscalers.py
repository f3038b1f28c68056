"""Autoscalers that ship: each says how many replicas there should be."""

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
    PositiveInt,
    RoutedRequest,
)


class QueueTokens(AutoscalerInterface):
    """An autoscaler that wants as many replicas as have no more tokens queued, nor more KV cache in
    use, than their targets.

    Source: the autoscaling policy of `aioserve.fleet.ray`, which Ray Serve asks; its delays are
    here as `stable_seconds`. A queue in tokens tells a long document from a short question.

    Simplified: while a replica has not said how full its KV cache is, none is stopped.

    Cost: O(n) of n replicas.
    """

    class Options(AutoscalerOptions):
        queued_tokens: PositiveFloat = 8192.0  # of prompts without a first token, a replica
        kv_cache: Annotated[float, Meta(gt=0, le=1)] = 0.8  # share in use, a replica
        stable_seconds: NonNegativeFloat = 60.0  # for which fewer must have been enough

    options: Options

    def decide(self, fleet: FleetView) -> int:
        tokens = sum(replica.num_unstarted_tokens for replica in fleet.replicas)
        used = sum(
            1 - replica.num_free_kv_tokens / replica.num_kv_tokens
            for replica in fleet.replicas
            if replica.num_kv_tokens
        )
        wanted = max(tokens / self.options.queued_tokens, used / self.options.kv_cache)
        if not all(replica.num_kv_tokens for replica in fleet.replicas):
            wanted = max(wanted, fleet.num_replicas)
        return self.steady(math.ceil(wanted), fleet, self.options.stable_seconds)


NUM_KEPT = 500
MOST_GROWTH = 2.0  # times those that serve, while a queue says nothing of how many would be enough


class SloAttainment(AutoscalerInterface):
    """An autoscaler that wants as many replicas as are predicted to keep a share of requests within
    their time to first token.

    Source: service levels as the objective of scaling, as in llm-d's autoscaler and PolyServe
    (2025).

    Says: of the newest 500 requests of the last minute that came after the newest replica served,
    the first tokens tell which part of its time a request used that was later than the stated share
    of all. That part is predicted to grow with the load of a replica, so to fall with their number:
    the least number at which it fits is wanted. While replicas start, none is asked for.

    Simplified: a queue grows faster than in proportion, so that one replica at a time goes, and at
    most twice as many are wanted as serve. A request without the hint `slo_ttft` is held to an
    option. Where no such request has a first token, the number stays, or falls by one if no replica
    has requests.

    Cost: O(500 log 500).
    """

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


class TargetUtilization(AutoscalerInterface):
    """An autoscaler that wants as many replicas as keep the share of taken seats at a target
    (Kubernetes' HPA).

    Source: Kubernetes, "Horizontal Pod Autoscaling": replicas x metric / target, rounded up, and no
    change while the ratio is within a tolerance. Fewer only when that was enough for a while.

    Simplified: the metric is the share of seats that requests have or wait for; what starts counts
    as free seats.

    Cost: O(n) of n replicas.
    """

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
