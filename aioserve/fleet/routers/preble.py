"""Where most of the prompt is cached, else where load and missing tokens are least (Preble).

Paper: Srivatsa et al., "Preble: Efficient Distributed Prompt Scheduling for LLM Serving", ICLR'25,
arXiv 2407.00023: its global scheduler, E2.

Aim: exploit shared prefixes without piling their requests up, and explore the other replicas.

Says: if more of the prompt is cached somewhere than is missing, exploit: of the replicas with the
longest prefix the one with the least load. Otherwise explore: the replica with the least sum of its
load in a window of time and the tokens that are missing there. A replica whose load is several
times the least gives its exploiting requests away to the least loaded.

Simplified: load is in tokens: what was computed for requests sent in the window, and what is held
now. The cost of what would be evicted is left out, since a router does not know it; so is growing a
hot prefix onto more replicas ahead of time.

Cost: O(blocks + n) of n replicas.
"""

from collections import deque
from typing import Any

from aioserve.fleet.routing import (
    BaseRouter,
    PositiveFloat,
    Replicas,
    ReplicaView,
    RoutedRequest,
    RouterOptions,
)

MOST_KEPT = 10_000  # requests of the window


class Preble(BaseRouter):
    """Exploits long cached prefixes, explores for other prompts, and evens out the load."""

    uses_prefixes = True

    class Options(RouterOptions):
        window: PositiveFloat = 180.0  # seconds of the past whose load counts
        imbalance: PositiveFloat = 2.0  # times the least load from which exploiting ends

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent: deque[tuple[float, str, int]] = deque()  # time, replica, tokens computed
        self.computed: dict[str, int] = {}  # tokens in the window, by replica

    def choose(self, request: RoutedRequest, replicas: Replicas) -> ReplicaView:
        self.forget_old()
        loads = {r.name: r.work + self.computed.get(r.name, 0) for r in replicas}
        cached = self.prefixes.by_name(request)
        least = min(replicas, key=lambda r: loads[r.name])
        longest = max((cached.get(r.name, 0) for r in replicas), default=0)
        if 2 * longest > request.num_tokens:
            holders = [r for r in replicas if cached.get(r.name, 0) == longest]
            chosen = min(holders, key=lambda r: loads[r.name])
            bound = self.options.imbalance * (loads[least.name] + request.num_tokens)
            if loads[chosen.name] > bound:
                chosen = least
        else:
            chosen = min(replicas, key=lambda r: loads[r.name] - cached.get(r.name, 0))
        missing = request.num_tokens - cached.get(chosen.name, 0)
        self.sent.append((self.clock(), chosen.name, missing))
        self.computed[chosen.name] = self.computed.get(chosen.name, 0) + missing
        return chosen

    def forget_old(self) -> None:
        """Take off what was sent before the window."""
        begin = self.clock() - self.options.window
        while self.sent and (self.sent[0][0] < begin or len(self.sent) > MOST_KEPT):
            _, name, tokens = self.sent.popleft()
            if name in self.computed:
                self.computed[name] -= tokens

    def on_join(self, name: str) -> None:
        self.sent = deque(entry for entry in self.sent if entry[1] != name)
        self.computed[name] = 0

    def on_leave(self, name: str) -> None:
        self.computed.pop(name, None)
