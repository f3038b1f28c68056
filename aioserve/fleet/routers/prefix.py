"""The replica that holds the longest prefix, unless waiting there costs more than it saves.

Then the one with the least work. Both are in tokens: what the holder need not compute, against what
it has to do more than the least busy one. Cost: O(blocks + n) of n replicas.
"""

from operator import attrgetter

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest

work_of = attrgetter("work")


class PrefixAware(BaseRouter):
    """Chooses the least busy holder of the longest prefix, or the least busy of all."""

    uses_prefixes = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        least = min(replicas, key=work_of)
        longest, names = self.prefixes.longest(request)
        named = set(names)
        holders = [replica for replica in replicas if replica.name in named]
        if not holders:
            return least
        holder = min(holders, key=work_of)
        saved = longest - self.prefixes.cached_tokens(request, least.name)
        return least if holder.work - least.work > saved else holder
