"""Routers that published results are measured against.

Each is what its source says, and nothing for users to choose.
"""

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest


class VllmRouter(BaseRouter):
    """vLLM v1's data parallel load balancing: the least of 4 x waiting + running. What was sent and
    is not reported yet counts as waiting there, too.
    """

    uses_reports = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        def score(replica: ReplicaView) -> int:
            unreported = max(replica.num_sent - replica.num_running - replica.num_waiting, 0)
            return 4 * (replica.num_waiting + unreported) + replica.num_running

        return min(replicas, key=score)
