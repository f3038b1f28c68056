"""The least product of prompt tokens to compute and batch size (LMetric, OSDI'26).

Paper: Zhang et al., "LMetric: Simple is Better: Multiplication May Be All You Need for LLM Request
Scheduling", OSDI'26, arXiv 2603.15202.

Aim: cached prefixes and an even load at once, without a weight between the two.

Says: the score of a replica is the number of prompt tokens that it would have to compute, times its
batch size; the least score wins. A weight of either factor would cancel out in the comparison.

Simplified: prompt tokens are those of the request that are not cached and those that were sent and
have no first token; the batch counts the request itself, so that no score is 0.

Cost: O(blocks + n) of n replicas.
"""

import math

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest


class LMetric(BaseRouter):
    """Chooses the replica with the least (tokens to compute) x (batch size)."""

    uses_prefixes = True
    uses_reports = True

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        cached = self.prefixes.by_name(request)
        chosen, least, whole = replicas[0], math.inf, max(request.num_tokens, 1)
        for replica in replicas:  # without a call for each: a fleet may have thousands
            batch = replica.num_running + replica.num_waiting
            batch = max(batch, replica.num_sent) if replica.num_sent else batch
            new = max(whole - cached[replica.name], 1) if replica.name in cached else whole
            score = (replica.num_unstarted_tokens + new) * (batch + 1)
            if score < least:
                chosen, least = replica, score
        return chosen
