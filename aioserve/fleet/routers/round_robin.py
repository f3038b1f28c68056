"""Replicas in turn, whatever they have to do.

Simplified: nothing. Cost: O(1).
"""

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest


class RoundRobin(BaseRouter):
    """Chooses one replica after the other."""

    num_chosen = 0

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        self.num_chosen += 1
        return replicas[(self.num_chosen - 1) % len(replicas)]
