"""The replica with fewer requests of two that are drawn, by their true queues (Mitzenmacher, 2001).

Paper: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS, 2001; the
default router of Ray Serve.

Simplified: the two are not asked: their last reports are looked at, and what was sent since.

Cost: O(1).
"""

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest


class PowerOfTwo(BaseRouter):
    """Draws two replicas and chooses the one with fewer requests."""

    uses_reports = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        if len(replicas) == 1:
            return replicas[0]
        first, second = self.rng.sample(range(len(replicas)), 2)
        return min(replicas[first], replicas[second], key=lambda replica: replica.num_requests)
