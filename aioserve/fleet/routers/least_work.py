"""The replica with the least work, in tokens, by the sender's own account.

Work is what was sent and has not ended: prompts until their first token, and half of what is held
while a reply is made. Needs nothing that replicas report. Cost: O(n) of n replicas.
"""

from operator import attrgetter

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest

work_of = attrgetter("work")


class LeastWork(BaseRouter):
    """Chooses the replica with the least work; of equals the first."""

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        return min(replicas, key=work_of)
