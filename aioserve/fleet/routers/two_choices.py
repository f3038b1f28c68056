"""The replica with less work of two that are drawn (Mitzenmacher, 2001).

Paper: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS, 2001.
Two draws come close to the least of all, and several senders do not all rush to the same replica.
Work is the sender's own account, as in `least_work`. Cost: O(1).
"""

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest


class TwoChoices(BaseRouter):
    """Draws two replicas and chooses the one with less work; of equals the first drawn."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        if len(replicas) == 1:
            return replicas[0]
        first, second = self.rng.sample(range(len(replicas)), 2)
        return min(replicas[first], replicas[second], key=lambda replica: replica.work)
