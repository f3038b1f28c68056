"""Virtual token counter per client (VTC; Sheng et al., OSDI'24), with a locality quantum (DLPM).

Every client (`user` of the request) has a counter of the tokens that it was served, output
weighing more than input, divided by its weight; the client with the lowest counter is admitted
next. A new or returning client starts at the lowest counter of the waiting ones: being away earns
nothing, and a debt is kept until the others have caught up. Clients with work waiting differ
in service by at most about twice one request or one full batch, whichever is more. Among
clients within `quantum` of the lowest, the longest cached prefix goes first: more hits, so much
less fairness. Work computed again after a preemption is not charged. What a step costs grows with
the clients whose requests come, run or go, and hardly with those that wait.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
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
        # Waiting clients, the one served least first: counter, key of the first request, name. An
        # entry that is not the client's in `_entries` is out of date, and dropped when it comes up;
        # counters only rise, so that it comes up before the right one.
        self._line: list[tuple[float, Any, str]] = []
        self._entries: dict[str, tuple[float, Any, str]] = {}
        self._changed: set[str] = set()  # clients with another first request since the last step

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        self.lift_newcomers()
        prefills = step.run_decodes()
        for user, num_tokens in Counter(r.user for r in step.requests).items():
            self.charge(user, self.options.output_weight * num_tokens)
        for request in sorted(prefills, key=lambda r: self.served[r.user]):
            self.charge_prompt(request, step.run(request))
        while self.waiting:
            request = self.next_head()
            granted = step.admit(request)
            if not granted:
                break
            self.charge_prompt(request, granted)
            if not self.waiting:
                self.floor = max(self.floor, self.served[request.user])
        if self.num_steps % FORGET_EVERY == 0:
            self.forget()
        return step.output()

    def next_head(self) -> Request:
        """The first request of the client served least; within the quantum, the best cached."""
        changed = self.waiting.take_changed()
        self._changed.update(changed)
        self.enter(changed)
        near: list[tuple[float, Any, str]] = []
        num_compared = MAX_COMPARED if self.options.quantum else 1
        while len(near) < num_compared and (entry := self.lowest()) is not None:
            if near and entry[0] > near[0][0] + self.options.quantum:
                break
            near.append(heappop(self._line))
        for entry in near:
            heappush(self._line, entry)
        heads = [head for *_, user in near if (head := self.waiting.head(user)) is not None]
        return max(heads, key=self.kv_cache.estimate_cached_tokens) if heads[1:] else heads[0]

    def enter(self, users: Iterable[str]) -> None:
        """Put clients in line whose first request changed; those that do not wait leave it."""
        for user in users:
            head = self.waiting.head(user)
            if head is None:
                self._entries.pop(user, None)
            else:
                self._entries[user] = entry = (self.served[user], head.order_key, user)
                heappush(self._line, entry)
        if len(self._line) > 2 * len(self._entries) + 64:
            self._line = list(self._entries.values())
            heapify(self._line)

    def lowest(self) -> tuple[float, Any, str] | None:
        """The entry of the waiting client that was served least; None: no client waits."""
        while self._line:
            entry = self._line[0]
            user = entry[-1]
            if self._entries.get(user) is not entry:
                heappop(self._line)
            elif entry[0] != self.served[user]:  # it was charged since
                heappop(self._line)
                self.enter([user])
            else:
                return entry
        return None

    def gauges(self) -> dict[str, float]:
        """The lowest counter of the waiting clients, how many have a counter, how many wait."""
        return {
            "floor": self.floor,
            "clients": len(self.served),
            "clients_waiting": len(self._waited),
        }

    def charge(self, user: str, virtual_tokens: float) -> None:
        self.served[user] += virtual_tokens / self.options.weights.get(user, 1.0)

    def charge_prompt(self, request: Request, num_tokens: int) -> None:
        if request.num_preemptions == 0:
            self.charge(request.user, self.options.input_weight * num_tokens)

    def lift_newcomers(self) -> None:
        """No credit for having been away."""
        changed = self._changed.union(self.waiting.take_changed())
        self._changed = set()
        here = {user for user in changed if self.waiting.head(user) is not None}
        came = here - self._waited
        for user in changed - here | came:  # what follows is of those that have waited before
            self._entries.pop(user, None)
        self.enter(here - came)
        if (stayed := self.lowest()) is not None:
            self.floor = max(self.floor, stayed[0])
        for user in came:
            self.served[user] = max(self.served[user], self.floor)
        self._waited -= changed - here
        self._waited |= here
        self.enter(came)

    def forget(self) -> None:
        """Drop the clients that are gone and would start at the floor anyway, to bound memory."""
        present = self._waited | {request.user for request in self.running}
        for user in [u for u, s in self.served.items() if s <= self.floor and u not in present]:
            del self.served[user]
