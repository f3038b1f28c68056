"""The greatest weighted sum of scores between 0 and 1 (the endpoint picker of llm-d).

Source: llm-d, "Request Scheduler" (llm-d.ai/docs, 0.8): filters, scorers with weights, a picker.

Aim: one router for many wishes, by weights instead of code.

Says: `prefix` is the share of the prompt that is cached; `queue` is 1 for the shortest queue of all
and 0 for the longest; `kv_cache` is the free share of the KV cache; `session` is 1 for the replica
that had the session last. The replica with the greatest sum wins.

Simplified: no filters, and no scorer of adapters, which replicas do not report. Ties go to the
least work, not to chance. Sessions are remembered for the last 10,000.

Cost: O(blocks + n) of n replicas.
"""

from collections import OrderedDict
from typing import Any

from aioserve.routing import (
    BaseRouter,
    NonNegativeFloat,
    Replicas,
    ReplicaView,
    RoutedRequest,
    RouterOptions,
)

MOST_SESSIONS = 10_000


class Scorers(BaseRouter):
    """Chooses the replica with the greatest weighted score."""

    uses_prefixes = True
    uses_reports = True

    class Options(RouterOptions):
        prefix: NonNegativeFloat = 3.0
        queue: NonNegativeFloat = 2.0
        kv_cache: NonNegativeFloat = 2.0
        session: NonNegativeFloat = 0.0

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.homes: OrderedDict[str, str] = OrderedDict()  # by session, the longest unused first

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        weights, cached = self.options, self.prefixes.by_name(request)
        home = self.homes.get(request.session, "") if weights.session else ""
        queues = [self.queue_of(replica) for replica in replicas]
        longest, spread = max(queues), max(max(queues) - min(queues), 1)

        def score(replica: ReplicaView) -> tuple[float, float]:
            total = weights.prefix * cached.get(replica.name, 0) / max(request.num_tokens, 1)
            total += weights.queue * (longest - self.queue_of(replica)) / spread
            total += weights.kv_cache * replica.num_free_kv_tokens / max(replica.num_kv_tokens, 1)
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
        """Requests that wait: as reported, and those that were sent and are not reported yet."""
        return max(replica.num_waiting, replica.num_sent - replica.num_running)
