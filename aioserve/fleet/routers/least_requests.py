"""The replica with the fewest requests, running or waiting, those of other senders included.

Says: what a load balancer calls least requests, with the true queues of replicas. Knows nothing of
how long requests are, nor of prefixes.

Simplified: nothing. What was sent and is not reported yet counts, so that a crowd does not follow
an old report.

Cost: O(n) of n replicas.
"""

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest


class LeastRequests(BaseRouter):
    """Chooses the replica with the fewest requests; of equals the one with the least work."""

    uses_reports = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        return min(replicas, key=lambda replica: (replica.num_requests, replica.work))
