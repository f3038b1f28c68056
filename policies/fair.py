"""Virtual token counter per client (VTC; Sheng et al., OSDI'24), with a locality quantum (DLPM).

Every client (`user` of the request) has a counter of its service: the tokens that it got, where
output tokens count more than input tokens, divided by its weight. The client with the lowest
counter is admitted next. A new or returning client starts at the lowest counter of the waiting
clients: being away earns no credit, and a higher counter is kept until the others have caught up.
The service of clients with waiting requests differs by at most about twice one request or one full
batch, whichever is more. Among clients within `quantum` of the lowest counter, the longest cached
prefix goes first, which gains cache hits and loses that much fairness. Work computed again after a
preemption is not charged. The cost of a step grows with the number of clients whose requests
arrive, run or end, and hardly with the number of those that wait.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    OrderPart,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    Step,
    hinted_text,
)

MAX_COMPARED = 64  # clients within the quantum whose prefixes are looked up for an admission
FORGET_EVERY = 256  # steps


class FairOrder(OrderPart):
    """The next request of the client that was served least."""

    admits_in_order = "group"

    class Options(PolicyOptions):
        input_weight: PositiveFloat = 1.0  # charge for a prompt token that is computed
        output_weight: PositiveFloat = 2.0  # charge for a generated token
        weights: dict[str, PositiveFloat] = {}  # noqa: RUF012 - share by client; 1 if not named
        quantum: NonNegativeFloat = 0.0  # virtual tokens by which locality may bend the order
        by: str = "user"  # what a client is: the `user`, or the value of a hint, such as program

    def __init__(self, policy: BaseScheduler, options: Any) -> None:
        super().__init__(policy, options)
        self.client: Callable[[Request], str] = attrgetter("user")  # request.user, but quicker
        if options.by != "user":
            self.client = lambda request: hinted_text(request, options.by)
        self.floor = 0.0  # lowest counter of the waiting clients, or the last of them; only rises
        # Virtual tokens by client. A client not in it, as one that runs at a policy switch,
        # starts at the floor.
        self.counters: dict[str, float] = defaultdict(lambda: self.floor)
        self._waited: set[str] = set()  # clients, in the last step
        # Waiting clients, the one served least first: counter, key of the first request, name. An
        # entry that is not the client's in `_entries` is out of date, and dropped when it comes up;
        # counters only rise, so that it comes up before the right one.
        self._line: list[tuple[float, Any, str]] = []
        self._entries: dict[str, tuple[float, Any, str]] = {}
        self._changed: set[str] = set()  # clients with another first request since the last step
        self._passed: set[str] = set()  # clients in no line until the next step

    def group(self, request: Request) -> str:
        return self.client(request)

    def begin(self) -> None:
        if self._passed:
            passed, self._passed = self._passed, set()
            self.enter(passed)
        self.lift_newcomers()
        if self.policy.num_steps % FORGET_EVERY == 0:
            self.forget()

    def decoded(self, requests: list[Request]) -> None:
        for client, num_tokens in Counter(map(self.client, requests)).items():
            self.charge(client, self.options.output_weight * num_tokens)

    def decoded_on(self, requests: list[Request], num_steps: int) -> None:
        """Charge for steps that only decode, as if each had begun and been charged for."""
        self.begin()
        for client, num_tokens in Counter(map(self.client, requests)).items():
            for _ in range(num_steps):  # one by one, since sums of floats are rounded each time
                self.charge(client, self.options.output_weight * num_tokens)

    def line(self, step: Step, prompts: list[Request], num_tokens: int | None) -> Iterator[Request]:
        yield from sorted(prompts, key=lambda r: self.counters[self.client(r)])
        waiting = self.policy.waiting
        while waiting and (request := self.next_head()) is not None:
            yield request
            client = self.client(request)
            if request in waiting:  # it was held back: its client is passed over in this step
                self._passed.add(client)
                self._entries.pop(client, None)
            elif not waiting:
                self.floor = max(self.floor, self.counters[client])

    def served(self, request: Request, num_tokens: int) -> None:
        if request.num_preemptions == 0:
            self.charge(self.client(request), self.options.input_weight * num_tokens)

    def gauges(self) -> dict[str, float]:
        """Return the lowest counter of the waiting clients, how many have a counter, how
        many wait.
        """
        return {
            "floor": self.floor,
            "clients": len(self.counters),
            "clients_waiting": len(self._waited),
        }

    def charge(self, client: str, virtual_tokens: float) -> None:
        self.counters[client] += virtual_tokens / self.options.weights.get(client, 1.0)

    def next_head(self) -> Request | None:
        """Return the first request of the client served least; within the quantum, the best cached.
        None: all clients were passed over.
        """
        changed = self.policy.waiting.take_changed()
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
        head_of = self.policy.waiting.head
        heads = [head for *_, client in near if (head := head_of(client)) is not None]
        if not heads[1:]:
            return heads[0] if heads else None
        return max(heads, key=self.policy.kv_cache.estimate_cached_tokens)

    def enter(self, clients: Iterable[str]) -> None:
        """Put clients in line whose first request changed; those that do not wait leave it."""
        for client in clients:
            head = self.policy.waiting.head(client)
            if head is None:
                self._entries.pop(client, None)
            else:
                self._entries[client] = entry = (self.counters[client], head.order_key, client)
                heappush(self._line, entry)
        if len(self._line) > 2 * len(self._entries) + 64:
            self._line = list(self._entries.values())
            heapify(self._line)

    def lowest(self) -> tuple[float, Any, str] | None:
        """Return the entry of the waiting client that was served least; None: no client waits."""
        while self._line:
            entry = self._line[0]
            client = entry[-1]
            if self._entries.get(client) is not entry:
                heappop(self._line)
            elif entry[0] != self.counters[client]:  # it was charged since
                heappop(self._line)
                self.enter([client])
            else:
                return entry
        return None

    def lift_newcomers(self) -> None:
        """No credit for having been away."""
        head_of = self.policy.waiting.head
        changed = self._changed.union(self.policy.waiting.take_changed())
        self._changed = set()
        here = {client for client in changed if head_of(client) is not None}
        came = here - self._waited
        for client in changed - here | came:  # what follows is of those that have waited before
            self._entries.pop(client, None)
        self.enter(here - came)
        if (stayed := self.lowest()) is not None:
            self.floor = max(self.floor, stayed[0])
        for client in came:
            self.counters[client] = max(self.counters[client], self.floor)
        self._waited -= changed - here
        self._waited |= here
        self.enter(came)

    def forget(self) -> None:
        """Drop the clients that are gone and would start at the floor anyway, to bound memory."""
        present = self._waited.union(map(self.client, self.policy.running))
        gone = [c for c, n in self.counters.items() if n <= self.floor and c not in present]
        for client in gone:
            del self.counters[client]


class FairScheduler(BaseScheduler):
    """Decodes, running prompts, then the next request of the client that was served least."""

    admits_in_order = "group"
    keeps_decoding = True

    class Options(FairOrder.Options):
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.clients = FairOrder(self, self.options)

    def group_by(self, request: Request) -> str:
        return self.clients.client(request)

    def schedule(self) -> SchedulerOutput:
        clients, step = self.clients, self.new_step(self.options.chunk_size)
        clients.begin()
        prompts = step.run_decodes()
        clients.decoded(step.requests)
        running = set(prompts)
        for request in clients.line(step, prompts, None):
            if request in running:
                clients.served(request, step.run(request))
            elif granted := step.admit(request):
                clients.served(request, granted)
            else:
                break
        return step.output()

    def decoded_on(self, requests: list[Request], num_steps: int) -> None:
        self.clients.decoded_on(requests, num_steps)

    def gauges(self) -> dict[str, float]:
        return self.clients.gauges()
