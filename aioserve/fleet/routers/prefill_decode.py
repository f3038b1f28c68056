"""Prompts on some replicas and replies on others, with KV blocks handed over (DistServe, OSDI'24).

Paper: Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large
Language Model Serving", OSDI'24, arXiv 2401.09670.

Aim: no long prompt between two tokens of a reply.

Says: the prompt goes to the prefill replica with the fewest prompt tokens to compute, cached ones
left out; the reply goes to the decode replica with the fewest requests, those on their way counted.

Simplified: roles are those of the fleet's settings; the paper finds how many of each it takes. A
prompt of which `most_local` tokens at most are missing at its decode replica is computed there. A
fleet without roles, or without one of the two, serves whole requests.

Cost: O(blocks + n) of n replicas.
"""

from typing import Annotated, Any

from msgspec import Meta

from aioserve.fleet.routing import (
    Answer,
    BaseRouter,
    Replicas,
    ReplicaView,
    RoutedRequest,
    RouterOptions,
    Split,
)


class PrefillDecode(BaseRouter):
    """A router that splits a request between a replica for prompts and one for replies."""

    uses_prefixes = True
    uses_reports = True
    splits = True

    class Options(RouterOptions):
        most_local: Annotated[int, Meta(ge=0)] = 64  # missing tokens of a prompt without a copy

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.target: dict[str, str] = {}  # decode replica of each request that is not there yet
        self.coming: dict[str, int] = {}  # how many those are, by decode replica

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        cached = self.prefixes.by_name(request)

        def to_compute(replica: ReplicaView) -> tuple[int, int]:
            missing = request.num_tokens - cached.get(replica.name, 0)
            return (replica.num_unstarted_tokens + missing) * (replica.num_requests + 1), missing

        def crowd(replica: ReplicaView) -> tuple[int, int]:
            num_requests = replica.num_requests + self.coming.get(replica.name, 0)
            return num_requests, -cached.get(replica.name, 0)

        prefillers = [replica for replica in replicas if replica.role != "decode"]
        decoders = [replica for replica in replicas if replica.role != "prefill"]
        if not prefillers or not decoders or not any(replica.role for replica in replicas):
            return min(replicas, key=to_compute)
        decode, prefill = min(decoders, key=crowd), min(prefillers, key=to_compute)
        missing = request.num_tokens - cached.get(decode.name, 0)
        if missing <= self.options.most_local or prefill is decode:
            return decode
        self.arrived(request)
        self.target[request.request_id] = decode.name
        self.coming[decode.name] = self.coming.get(decode.name, 0) + 1
        return Split(prefill, decode)

    def arrived(self, request: RoutedRequest) -> None:
        """The request is on its way no more: it has come, or has ended."""
        name = self.target.pop(request.request_id, None)
        if name is not None and self.coming.get(name):
            self.coming[name] -= 1

    def on_move(self, request: RoutedRequest, source: str, target: str) -> None:
        self.arrived(request)

    def on_end(self, request: RoutedRequest, name: str) -> None:
        self.arrived(request)

    def on_leave(self, name: str) -> None:
        self.coming.pop(name, None)
