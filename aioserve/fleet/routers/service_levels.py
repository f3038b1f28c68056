"""The fullest replica that still meets the request's service level, so that others stay free.

`PolyServe` looks at times per token, `PredictedLatency` at the time to the first token as well.
"""

from typing import Annotated, Any

from msgspec import Meta

from aioserve.fleet.routing import (
    BaseRouter,
    PositiveFloat,
    PositiveInt,
    Replicas,
    ReplicaView,
    RoutedRequest,
    RouterOptions,
)

KEPT = 0.9  # weight of what `PredictedLatency` knows beside a new first token


class PolyServe(BaseRouter):
    """A router that packs requests onto full replicas, as far as their times per token allow.

    Paper: Zhu et al., "PolyServe: Efficient Multi-SLO Serving at Scale", arXiv 2507.17769.

    Aim: a gradient of load, so that the replicas at its end can be switched off, and service
    levels.

    Says: requests are held to a time per token by their class. One goes to the replica with the
    highest load on which it, and all that run there, still get their tokens in time; if there
    is none, to the replica with the fewest.

    Simplified: one fleet for all classes: there are no bins of replicas by class. The time per
    token is the hint `slo_tpot`, else an option. Step times are the line over the batch that
    each replica has learned, where the paper has profiles; prompts count as tokens that a
    replica may have to compute.

    Cost: O(n) of n replicas.
    """

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


class PredictedLatency(BaseRouter):
    """A router that predicts latencies and chooses by what the request's service levels leave.

    Source: llm-d, "Predicted latency based scheduling" (llm-d.ai): a latency model that learns
    online, and headroom, the time that a service level leaves.

    Aim: service levels of requests, without weights that have to be tuned.

    Says: predict the time to first token and the time per token of the request at each replica.
    Of the replicas that meet both levels the one with the least headroom gets it, so that
    others stay free for tighter requests; if none does, or no level is stated, the one with the
    least time to first token.

    Simplified: a prediction may take up half of a level (an option). The model is one number
    for each replica, seconds per prompt token that lies before the first token, learned from
    first tokens; the time per token is that of the newest steps. llm-d trains gradient-boosted
    trees on more features.

    Cost: O(blocks + n) of n replicas.
    """

    uses_prefixes = True
    uses_reports = True

    class Options(RouterOptions):
        most_used: Annotated[float, Meta(gt=0, le=1)] = 0.5  # of a level, by what is predicted

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rates: dict[str, float] = {}  # seconds per token before the first, by replica
        self.tokens: dict[tuple[str, str], int] = {}  # before first tokens to come, by request

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        cached = self.prefixes.by_name(request)
        usual = sum(self.rates.values()) / max(len(self.rates), 1)
        tokens, ttft = dict[str, int](), dict[str, float]()
        for replica in replicas:
            new = max(request.num_tokens - cached.get(replica.name, 0), 1)
            tokens[replica.name] = count = replica.num_unstarted_tokens + new
            rate = self.rates.get(replica.name, usual) or 1e-9  # then by tokens alone
            ttft[replica.name] = rate * count + replica.step_seconds
        meeting = [r for r in replicas if self.meets(request, r, ttft[r.name])]
        if meeting:
            chosen = max(meeting, key=lambda r: (ttft[r.name], -r.num_requests))
        else:
            chosen = min(replicas, key=lambda r: (ttft[r.name], r.num_requests))
        self.tokens[chosen.name, request.request_id] = tokens[chosen.name]
        return chosen

    def meets(self, request: RoutedRequest, replica: ReplicaView, ttft: float) -> bool:
        """Return whether the request states a time to first token and is predicted to get it, and
        its time per token.
        """
        share = self.options.most_used
        if request.slo_ttft is None or ttft > share * request.slo_ttft:
            return False
        has_seat = not replica.max_num_seqs or replica.num_requests < replica.max_num_seqs
        tpot = request.slo_tpot
        return has_seat and (tpot is None or replica.step_seconds <= share * tpot)

    def on_first_token(self, request: RoutedRequest, name: str, seconds: float) -> None:
        tokens = self.tokens.pop((name, request.request_id), 0)
        if tokens:
            kept = KEPT if name in self.rates else 0.0
            self.rates[name] = kept * self.rates.get(name, 0.0) + (1 - kept) * seconds / tokens

    def on_end(self, request: RoutedRequest, name: str) -> None:
        self.tokens.pop((name, request.request_id), None)

    def on_leave(self, name: str) -> None:
        self.rates.pop(name, None)
