"""The greatest weighted sum of scores between 0 and 1 (the endpoint picker of llm-d).

Source: llm-d, "Request Scheduler" (llm-d.ai/docs, 0.8): filters, scorers with weights, a picker.

Aim: one router for many wishes, by weights instead of code.

Says: `prefix` is the share of the prompt that is cached; `queue` is 1 for the shortest queue of all
and 0 for the longest; `kv_cache` is the free share of the KV cache; `session` is 1 for the replica
that had the session last; `adapter` is 1 where the request's LoRA adapter is loaded and half of it
where that is not known; `latency` is 1 for the shortest step with one request more, by the line
that the replica has learned, and 0 for the longest; `eviction` is 1 where the prompt fits beside
all cached prefixes. The replica with the greatest sum wins.

Simplified: no filters. Ties go to the least work, not to chance. Sessions are remembered for the
last 10,000.

Cost: O(blocks + n) of n replicas.
"""

from collections import OrderedDict
from typing import Any

from aioserve.fleet.routing import (
    BaseRouter,
    NonNegativeFloat,
    Replicas,
    ReplicaView,
    RoutedRequest,
    RouterOptions,
)

MOST_SESSIONS = 10_000


class Scorers(BaseRouter):
    """A router that chooses the replica with the greatest weighted score."""

    uses_prefixes = True
    uses_reports = True

    class Options(RouterOptions):
        prefix: NonNegativeFloat = 3.0
        queue: NonNegativeFloat = 2.0
        kv_cache: NonNegativeFloat = 2.0
        session: NonNegativeFloat = 0.0
        adapter: NonNegativeFloat = 2.0  # of requests that are for one
        latency: NonNegativeFloat = 0.0
        eviction: NonNegativeFloat = 0.0

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.homes: OrderedDict[str, str] = OrderedDict()  # by session, the longest unused first

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        weights, cached = self.options, self.prefixes.by_name(request)
        home = self.homes.get(request.session, "") if weights.session else ""
        queues = [self.queue_of(replica) for replica in replicas]
        longest, spread = max(queues), max(max(queues) - min(queues), 1)
        steps = [self.step_of(replica) for replica in replicas] if weights.latency else [0.0]
        slowest, step_spread = max(steps), max(steps) - min(steps) or 1.0

        def score(replica: ReplicaView) -> tuple[float, float]:
            total = weights.prefix * cached.get(replica.name, 0) / max(request.num_tokens, 1)
            total += weights.queue * (longest - self.queue_of(replica)) / spread
            total += weights.kv_cache * replica.num_free_kv_tokens / max(replica.num_kv_tokens, 1)
            if weights.adapter and request.adapter:
                total += weights.adapter * self.has_adapter(request, replica)
            if weights.latency:
                total += weights.latency * (slowest - self.step_of(replica)) / step_spread
            if weights.eviction:
                missing = request.num_tokens - cached.get(replica.name, 0)
                total += weights.eviction * (missing <= self.num_unused(replica))
            return total + weights.session * (replica.name == home), -replica.work

        chosen = max(replicas, key=score)
        if weights.session and request.session:
            self.homes[request.session] = chosen.name
            self.homes.move_to_end(request.session)
            if len(self.homes) > MOST_SESSIONS:
                self.homes.popitem(last=False)
        return chosen

    @staticmethod
    def queue_of(replica: ReplicaView) -> int:
        """Return requests that wait: as reported, and those that were sent and are not reported
        yet.
        """
        return max(replica.num_waiting, replica.num_sent - replica.num_running)

    @staticmethod
    def has_adapter(request: RoutedRequest, replica: ReplicaView) -> float:
        """1 if the adapter of the request is loaded, 0 if not, a half if that is not known."""
        return 0.5 if replica.adapters is None else float(request.adapter in replica.adapters)

    @staticmethod
    def step_of(replica: ReplicaView) -> float:
        """Return seconds that a step takes with one request more."""
        return replica.step_seconds_with(replica.num_requests + 1)

    @staticmethod
    def num_unused(replica: ReplicaView) -> int:
        """Free tokens of the KV cache without a cached prefix; all free ones if none is known."""
        return replica.num_free_kv_tokens - (replica.num_evictable_kv_tokens or 0)
