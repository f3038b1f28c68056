"""Prompts on some replicas and replies on others, with KV blocks handed over once.

`PrefillDecode` splits each request (DistServe, OSDI'24), `ConServe` the first turn of each
conversation (ConServe; PPD, 2026). Both count what is on its way to a replica for replies. A fleet
without roles, or without one of the two, serves whole requests.
"""

from typing import Annotated, Any

from msgspec import Meta

from aioserve.fleet.routing import (
    Answer,
    BaseRouter,
    PositiveInt,
    Replicas,
    ReplicaView,
    RoutedRequest,
    RouterOptions,
    Split,
)


class SplittingRouter(BaseRouter):
    """A router that counts the requests it has split until they reach their second replica."""

    uses_prefixes = True
    uses_reports = True
    splits = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.target: dict[str, tuple[str, int]] = {}  # by request: where it goes, and its size
        self.coming: dict[str, int] = {}  # the sum of sizes, by decode replica

    def sides(self, replicas: Replicas) -> tuple[list[ReplicaView], list[ReplicaView]]:
        """Return the replicas for prompts and those for replies; none if the fleet has no roles."""
        if not any(replica.role for replica in replicas):
            return [], []
        prefillers = [replica for replica in replicas if replica.role != "decode"]
        return prefillers, [replica for replica in replicas if replica.role != "prefill"]

    def split(
        self, request: RoutedRequest, prefill: ReplicaView, decode: ReplicaView, size: int
    ) -> Split:
        """Return the answer, and count `size` as coming to the decode replica."""
        self.arrived(request)
        self.target[request.request_id] = decode.name, size
        self.coming[decode.name] = self.coming.get(decode.name, 0) + size
        return Split(prefill, decode)

    def arrived(self, request: RoutedRequest) -> None:
        """Forget a request that was on its way: it has come, or has ended."""
        name, size = self.target.pop(request.request_id, ("", 0))
        if self.coming.get(name):
            self.coming[name] -= size

    def on_move(self, request: RoutedRequest, source: str, target: str) -> None:
        self.arrived(request)

    def on_end(self, request: RoutedRequest, name: str) -> None:
        self.arrived(request)

    def on_leave(self, name: str) -> None:
        self.coming.pop(name, None)
        self.target = {of: to for of, to in self.target.items() if to[0] != name}


class PrefillDecode(SplittingRouter):
    """A router that splits a request between a replica for prompts and one for replies.

    Paper: Zhong et al., "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large
    Language Model Serving", OSDI'24, arXiv 2401.09670.

    Aim: no long prompt between two tokens of a reply.

    Says: the prompt goes to the prefill replica with the fewest prompt tokens to compute, cached
    ones left out; the reply goes to the decode replica with the fewest requests, those on their way
    counted.

    Simplified: roles are those of the fleet's settings; the paper finds how many of each it takes.
    A prompt of which `most_local` tokens at most are missing at its decode replica is computed
    there.

    Cost: O(blocks + n) of n replicas.
    """

    class Options(RouterOptions):
        most_local: Annotated[int, Meta(ge=0)] = 64  # missing tokens of a prompt without a copy

    options: Options

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        cached = self.prefixes.by_name(request)

        def to_compute(replica: ReplicaView) -> tuple[int, int]:
            missing = request.num_tokens - cached.get(replica.name, 0)
            return (replica.num_unstarted_tokens + missing) * (replica.num_requests + 1), missing

        def crowd(replica: ReplicaView) -> tuple[int, int]:
            num_requests = replica.num_requests + self.coming.get(replica.name, 0)
            return num_requests, -cached.get(replica.name, 0)

        prefillers, decoders = self.sides(replicas)
        if not prefillers or not decoders:
            return min(replicas, key=to_compute)
        decode, prefill = min(decoders, key=crowd), min(prefillers, key=to_compute)
        missing = request.num_tokens - cached.get(decode.name, 0)
        if missing <= self.options.most_local or prefill is decode:
            return decode
        return self.split(request, prefill, decode, 1)


class ConServe(SplittingRouter):
    """A router that splits the first turn of a conversation, and keeps the others where it went.

    Source: Ding et al., "Observation, Not Prediction: Conversation-Level Disaggregated Scheduling
    for Agentic Serving" (ConServe), 2026, arXiv 2606.01839; Li et al., "Not All Prefills Are Equal:
    PPD Disaggregation for Multi-turn LLM Serving", 2026, arXiv 2603.13358.

    Aim: an early first token of every turn, and KV blocks that are copied once for a conversation.

    Says: the first turn has a long prompt, and later ones add little to what is cached. So the
    first prompt is computed by a replica for prompts, its KV cache is handed over once, and the
    conversation stays at that replica for replies to its end, where later turns compute what they
    add. The replica for replies is the one that holds the fewest KV tokens, which is known, and
    nothing is predicted. PPD decides for each later turn: one that adds much goes by a replica for
    prompts again.

    Simplified: a turn adds too much if more than `most_added` tokens are not cached, where PPD
    weighs service levels; by default every later turn stays, as in ConServe.

    Cost: O(blocks + n) of n replicas.
    """

    uses_programs = True

    class Options(RouterOptions):
        most_added: PositiveInt | None = None  # tokens that a later turn adds (None: any number)

    options: Options

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        prefillers, decoders = self.sides(replicas)
        if not prefillers or not decoders:
            return min(replicas, key=lambda replica: replica.work)
        program = self.programs.of(request)
        home = "" if program is None else program.replica
        decode = next((replica for replica in decoders if replica.name == home), None)
        if decode is not None and self.is_little(request, decode):
            return decode
        decode = decode or min(decoders, key=self.occupancy)
        prefill = min(prefillers, key=lambda r: (r.num_unstarted_tokens, r.work))
        if prefill is decode:
            return decode
        return self.split(request, prefill, decode, request.num_tokens)

    def is_little(self, request: RoutedRequest, decode: ReplicaView) -> bool:
        """Return whether the conversation's own replica should compute what the turn adds."""
        if self.options.most_added is None:
            return True
        cached = self.prefixes.cached_tokens(request, decode.name)
        return request.num_tokens - cached <= self.options.most_added

    def occupancy(self, replica: ReplicaView) -> tuple[int, float]:
        """Return the KV tokens that are held at a replica, or are on their way there."""
        held = replica.num_kv_tokens - replica.num_free_kv_tokens
        return held + self.coming.get(replica.name, 0), replica.work
