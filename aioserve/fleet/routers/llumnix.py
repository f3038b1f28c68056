"""The freest replica; requests move from full replicas to free ones while they run (Llumnix).

Paper: Sun et al., "Llumnix: Dynamic Scheduling for Large Language Model Serving", OSDI'24, arXiv
2406.03243.

Aim: less preemption and shorter queues, by correcting what was not known when a request came.

Says: the freeness of a replica is the KV cache that neither runs nor waits, divided by the batch:
steps for which all that run there can go on. A request goes to the freest replica. Every second the
least free ones below `out_below` are paired with the freest above `in_above`, and of each pair one
running request moves: of the least urgent ones the one with the shortest prompt.

Simplified: no headroom for requests of high priority, and no autoscaling by freeness. Replicas that
have not said how much memory they have are taken by their numbers of requests.

Cost: O(n) of n replicas; a rebalancing O(n log n + running requests of those that are full).
"""

from typing import Any

from aioserve.fleet.routing import (
    BaseRouter,
    Migrate,
    NonNegativeFloat,
    Replicas,
    ReplicaView,
    RoutedRequest,
    RouterOptions,
)


class Llumnix(BaseRouter):
    """A router that chooses the freest replica and moves running requests off full ones."""

    uses_reports = True
    rebalance_seconds = 1.0

    class Options(RouterOptions):
        out_below: NonNegativeFloat = 200.0  # steps of freeness of a replica that gives requests up
        in_above: NonNegativeFloat = 600.0  # steps of freeness of a replica that takes them

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running: dict[str, dict[str, RoutedRequest]] = {}  # by replica, by id

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        if not all(replica.num_kv_tokens for replica in replicas):
            return min(replicas, key=lambda replica: (replica.num_requests, replica.work))
        return max(replicas, key=lambda replica: (self.freeness(replica), -replica.work))

    def freeness(self, replica: ReplicaView) -> float:
        """Return steps for which all requests of the replica can go on, by the tokens that are
        free.
        """
        waiting = max(replica.num_unstarted_tokens, replica.num_waiting_tokens)
        return (replica.num_free_kv_tokens - waiting) / (replica.num_requests + 1)

    def rebalance(self, replicas: Replicas) -> list[Migrate]:
        known = sorted((r for r in replicas if r.num_kv_tokens), key=self.freeness)
        full = [r for r in known if self.freeness(r) < self.options.out_below]
        free = [r for r in reversed(known) if self.freeness(r) > self.options.in_above]
        moves = []
        for source, target in zip(full, free, strict=False):
            held = self.running.get(source.name, {}).values()
            fitting = [r for r in held if 2 * r.num_tokens < target.num_free_kv_tokens]
            if fitting:
                least = min(fitting, key=lambda r: (-r.priority, r.num_tokens))
                moves.append(Migrate(least.request_id, target))
        return moves

    def on_first_token(self, request: RoutedRequest, name: str, seconds: float) -> None:
        self.running.setdefault(name, {})[request.request_id] = request

    def on_move(self, request: RoutedRequest, source: str, target: str) -> None:
        self.on_end(request, source)
        self.running.setdefault(target, {})[request.request_id] = request

    def on_end(self, request: RoutedRequest, name: str) -> None:
        self.running.get(name, {}).pop(request.request_id, None)

    def on_leave(self, name: str) -> None:
        self.running.pop(name, None)
