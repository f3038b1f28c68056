"""The fullest replica that still meets the request's service level (PolyServe, 2025).

Paper: Zhu et al., "PolyServe: Efficient Multi-SLO Serving at Scale", arXiv 2507.17769.

Aim: a gradient of load, so that the replicas at its end can be switched off, and service levels.

Says: requests are held to a time per token by their class. One goes to the replica with the highest
load on which it, and all that run there, still get their tokens in time; if there is none, to
the replica with the fewest.

Simplified: one fleet for all classes: there are no bins of replicas by class. The time per token is
the hint `slo_tpot`, else an option. Step times are the line over the batch that each replica has
learned, where the paper has profiles; prompts count as tokens that a replica may have to compute.

Cost: O(n) of n replicas.
"""

from typing import Any

from aioserve.fleet.routing import (
    BaseRouter,
    PositiveFloat,
    PositiveInt,
    Replicas,
    ReplicaView,
    RoutedRequest,
    RouterOptions,
)


class PolyServe(BaseRouter):
    """A router that packs requests onto full replicas, as far as their times per token allow."""

    uses_reports = True

    class Options(RouterOptions):
        tpot: PositiveFloat = 0.05  # seconds per token of a request without the hint `slo_tpot`
        most_unstarted_tokens: PositiveInt = 4096  # of prompts that wait at a replica for a seat

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tightest: dict[str, dict[float, int]] = {}  # requests by time per token, by replica

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        wanted = self.tpot_of(request)
        meeting = [replica for replica in replicas if self.meets(replica, request, wanted)]
        if meeting:
            return max(meeting, key=lambda replica: replica.num_requests)
        return min(replicas, key=lambda replica: (replica.num_requests, replica.work))

    def tpot_of(self, request: RoutedRequest) -> float:
        """Return seconds per token that the request is held to."""
        return request.slo_tpot or self.options.tpot

    def meets(self, replica: ReplicaView, request: RoutedRequest, wanted: float) -> bool:
        """Return whether the request and all that were sent there get their tokens in time."""
        if not replica.step_seconds:
            return False  # it has said nothing yet
        unstarted = replica.num_unstarted_tokens
        if unstarted and unstarted + request.num_tokens > self.options.most_unstarted_tokens:
            return False
        count = replica.num_requests + 1
        if replica.max_num_seqs and count > replica.max_num_seqs:
            return False
        tightest = min(self.tightest.get(replica.name, ()), default=wanted)
        return replica.step_seconds_with(count) <= min(tightest, wanted)

    def on_first_token(self, request: RoutedRequest, name: str, seconds: float) -> None:
        held = self.tightest.setdefault(name, {})
        held[self.tpot_of(request)] = held.get(self.tpot_of(request), 0) + 1

    def on_end(self, request: RoutedRequest, name: str) -> None:
        held, tpot = self.tightest.get(name, {}), self.tpot_of(request)
        if tpot in held:
            held[tpot] -= 1
            if held[tpot] <= 0:
                del held[tpot]

    def on_leave(self, name: str) -> None:
        self.tightest.pop(name, None)
