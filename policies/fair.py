"""Virtual token counter per client (VTC; Sheng et al., OSDI'24), with a locality quantum (DLPM).

Every client (`user` of the request) has a counter of the tokens that it was served, output
weighing more than input, divided by its weight; the client with the lowest counter is admitted
next. A new or returning client starts at the lowest counter of the waiting ones: being away earns
nothing, and a debt is kept until the others have caught up. Clients with work waiting differ
in service by at most about twice one request or one full batch, whichever is more. Among
clients within `quantum` of the lowest, the longest cached prefix goes first: more hits, so much
less fairness. Work computed again after a preemption is not charged. Each admission costs 0.2
microseconds per client that waits, 0.5 with a quantum.
"""

from collections import Counter, defaultdict
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
)

MAX_COMPARED = 64  # clients within the quantum whose prefixes are looked up for an admission
FORGET_EVERY = 256  # steps


class FairScheduler(BaseScheduler):
    """Decodes, running prompts, then the next request of the client that was served least."""

    admits_in_order = "user"

    class Options(PolicyOptions):
        input_weight: PositiveFloat = 1.0  # charge for a prompt token that is computed
        output_weight: PositiveFloat = 2.0  # charge for a generated token
        weights: dict[str, PositiveFloat] = {}  # noqa: RUF012 - share by client; 1 if not named
        quantum: NonNegativeFloat = 0.0  # virtual tokens by which locality may bend the order
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.floor = 0.0  # lowest counter of the waiting clients, or the last of them; only rises
        # Virtual tokens by client. A client not in it, as one that runs at a policy switch,
        # starts at the floor.
        self.served: dict[str, float] = defaultdict(lambda: self.floor)
        self._waited: set[str] = set()  # clients, in the last step

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        self.lift_newcomers()
        prefills = step.run_decodes()
        for user, num_tokens in Counter(r.user for r in step.requests).items():
            self.charge(user, self.options.output_weight * num_tokens)
        for request in sorted(prefills, key=lambda r: self.served[r.user]):
            self.charge_prompt(request, step.run(request))
        while heads := self.waiting.heads():
            request = self.next_head(heads)
            granted = step.admit(request)
            if not granted:
                break
            self.charge_prompt(request, granted)
            if not self.waiting:
                self.floor = max(self.floor, self.served[request.user])
        if self.num_steps % FORGET_EVERY == 0:
            self.forget()
        return step.output()

    def next_head(self, heads: list[Request]) -> Request:
        """The first request of the client served least; within the quantum, the best cached."""
        served, quantum = self.served, self.options.quantum
        if not quantum:
            return min(heads, key=lambda r: (served[r.user], r.order_key))
        most = min(served[r.user] for r in heads) + quantum
        near = [r for r in heads if served[r.user] <= most]
        near.sort(key=lambda r: (served[r.user], r.order_key))
        return max(near[:MAX_COMPARED], key=self.kv_cache.estimate_cached_tokens)

    def charge(self, user: str, virtual_tokens: float) -> None:
        self.served[user] += virtual_tokens / self.options.weights.get(user, 1.0)

    def charge_prompt(self, request: Request, num_tokens: int) -> None:
        if request.num_preemptions == 0:
            self.charge(request.user, self.options.input_weight * num_tokens)

    def lift_newcomers(self) -> None:
        """No credit for having been away."""
        waiting = {request.user for request in self.waiting.heads()}
        stayed = [self.served[user] for user in waiting & self._waited]
        self.floor = max(self.floor, min(stayed, default=0.0))
        for user in waiting - self._waited:
            self.served[user] = max(self.served[user], self.floor)
        self._waited = waiting

    def forget(self) -> None:
        """Drop the clients that are gone and would start at the floor anyway, to bound memory."""
        present = self._waited | {request.user for request in self.running}
        for user in [u for u, s in self.served.items() if s <= self.floor and u not in present]:
            del self.served[user]
