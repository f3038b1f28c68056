"""The replica with the least predicted time to first token, or that just meets it (llm-d).

Source: llm-d, "Predicted latency based scheduling" (llm-d.ai): a latency model that learns online,
and headroom, the time that a service level leaves.

Aim: service levels of requests, without weights that have to be tuned.

Says: predict the time to first token and the time per token of the request at each replica. Of the
replicas that meet both levels the one with the least headroom gets it, so that others stay free for
tighter requests; if none does, or no level is stated, the one with the least time to first token.

Simplified: a prediction may take up half of a level (an option). The model is one number for each
replica, seconds per prompt token that lies before the first token, learned from first tokens; the
time per token is that of the newest steps. llm-d trains gradient-boosted trees on more features.

Cost: O(blocks + n) of n replicas.
"""

from typing import Annotated, Any

from msgspec import Meta

from aioserve.fleet.routing import BaseRouter, Replicas, ReplicaView, RoutedRequest, RouterOptions

KEPT = 0.9  # weight of what is known beside a new first token


class PredictedLatency(BaseRouter):
    """Predicts latencies and chooses by what the request's service levels leave of them."""

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
