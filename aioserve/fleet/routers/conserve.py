"""A conversation's first prompt on one replica, all the rest on another (ConServe; PPD, 2026).

Source: Ding et al., "Observation, Not Prediction: Conversation-Level Disaggregated Scheduling for
Agentic Serving" (ConServe), 2026, arXiv 2606.01839; Li et al., "Not All Prefills Are Equal: PPD
Disaggregation for Multi-turn LLM Serving", 2026, arXiv 2603.13358.

Aim: an early first token of every turn, and KV blocks that are copied once for a conversation.

Says: the first turn has a long prompt, and later ones add little to what is cached. So the first
prompt is computed by a replica for prompts, its KV cache is handed over once, and the conversation
stays at that replica for replies to its end, where later turns compute what they add. The replica
for replies is the one that holds the fewest KV tokens, which is known, and nothing is predicted.
PPD decides for each later turn: one that adds much goes by a replica for prompts again.

Simplified: a turn adds too much if more than `most_added` tokens are not cached, where PPD weighs
service levels; by default every later turn stays, as in ConServe.

Cost: O(blocks + n) of n replicas.
"""

from typing import Any

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


class ConServe(BaseRouter):
    """A router that splits the first turn of a conversation, and keeps the others where it went."""

    uses_prefixes = True
    uses_reports = True
    uses_programs = True
    splits = True

    class Options(RouterOptions):
        most_added: PositiveInt | None = None  # tokens that a later turn adds (None: any number)

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.target: dict[str, tuple[str, int]] = {}  # by request that is not there yet
        self.coming: dict[str, int] = {}  # their tokens, by decode replica

    def choose(self, request: RoutedRequest, replicas: Replicas) -> Answer:
        prefillers = [replica for replica in replicas if replica.role != "decode"]
        decoders = [replica for replica in replicas if replica.role != "prefill"]
        if not prefillers or not decoders or not any(replica.role for replica in replicas):
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
        self.arrived(request)
        self.target[request.request_id] = decode.name, request.num_tokens
        self.coming[decode.name] = self.coming.get(decode.name, 0) + request.num_tokens
        return Split(prefill, decode)

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

    def arrived(self, request: RoutedRequest) -> None:
        """Forget a request that was on its way: it has come, or has ended."""
        name, tokens = self.target.pop(request.request_id, ("", 0))
        if self.coming.get(name):
            self.coming[name] -= tokens

    def on_move(self, request: RoutedRequest, source: str, target: str) -> None:
        self.arrived(request)

    def on_end(self, request: RoutedRequest, name: str) -> None:
        self.arrived(request)

    def on_leave(self, name: str) -> None:
        self.coming.pop(name, None)
        self.target = {of: to for of, to in self.target.items() if to[0] != name}
