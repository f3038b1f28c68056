"""The scheduler of S-LoRA and of LightLLM: prompts run in rounds of their own, decodes wait.

A round is looked for when nothing runs, or after `decode_steps` steps of decodes and then before
every step. Requests enter in the policy's order for as long as the peak of memory that all running
ones will ever need together (`PeakMemory`) stays under the pool, and the prompts of the round under
`round_tokens`. Nothing is ever preempted. With `order: vtc` the client with the lowest virtual
token counter goes first (Sheng et al., OSDI'24), as that paper's artifact has it
(`slora/server/router/vtc_req_queue.py`), with its charge for all that run whenever a request ends.
"""

from collections import defaultdict
from typing import Any, Literal

from aioserve.scheduler import (
    BaseScheduler,
    PeakMemory,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
)


class PromptRoundsScheduler(BaseScheduler):
    """Whole prompts in rounds, then decodes; admission by peak memory, order by FCFS or VTC."""

    runs_whole_prompts = True

    class Options(PolicyOptions):
        order: Literal["fcfs", "vtc"] = "fcfs"
        pool_tokens: PositiveInt | None = None  # KV tokens (default: what the KV cache holds)
        round_tokens: PositiveInt = 3072  # most prompt tokens of a round of several prompts
        decode_steps: PositiveInt = (
            10  # steps of decodes after a round before the next is looked for
        )
        client_tokens: int = (
            0  # tokens of the pool that each client in the batch takes (its adapter)
        )
        sees_late: bool = False  # a request that comes while others run is seen one step later
        input_weight: PositiveFloat = 1.0  # charge for a prompt token
        output_weight: PositiveFloat = 2.0  # charge for a generated token
        weights: dict[str, PositiveFloat] = {}  # noqa: RUF012 - share by client; 1 if not named

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.served: dict[str, float] = defaultdict(float)  # virtual tokens, by client
        self._num_decodes = 0  # steps since the last round
        self._ran: set[str] = set()  # ids of the requests of the last step
        self._come: dict[str, Request] = {}  # since the last step; not seen yet
        self._late: dict[str, Request] = {}  # in the step before that; not seen yet

    def order(self, request: Request) -> float:
        if request.num_computed_tokens == 0:
            self._come[request.request_id] = request
        return request.arrival_time

    def schedule(self) -> SchedulerOutput:
        running = self.running
        self._charge_for_ends({request.request_id for request in running})
        self._see_arrivals()
        step = self.new_step()
        if not running or self._num_decodes >= self.options.decode_steps:
            num_admitted = 0
            peak, users = PeakMemory(running), {request.user for request in running}
            num_tokens = 0
            while (request := self._next()) is not None:
                num_tokens += request.num_tokens
                if num_admitted and num_tokens > self.options.round_tokens:
                    break
                if running or num_admitted:
                    if not self._fits(peak, users, request):
                        break
                if not step.admit(request, whole=True):
                    break
                num_admitted += 1
                peak.add(request)
                users.add(request.user)
                self._charge(request.user, self.options.input_weight * request.num_tokens)
            if num_admitted:
                self._num_decodes = 0
                self._ran = {request.request_id for request in self.running}
                return step.output()
        for request in running:
            step.run(request)
            self._charge(request.user, self.options.output_weight)
        self._num_decodes += 1
        self._ran = {request.request_id for request in self.running}
        return step.output()

    def _fits(self, peak: PeakMemory, users: set[str], request: Request) -> bool:
        pool: int = self.options.pool_tokens or self.kv_cache.num_slots
        pool -= self.options.client_tokens * len(users | {request.user})
        return peak.with_request(request) < pool

    def _next(self) -> Request | None:
        """The request that is to enter next, if one is there to be seen."""
        if self.options.order == "fcfs":
            request = next(iter(self.waiting), None)
            return None if request is None or self._is_unseen(request) else request
        seen = [request for request in self.waiting.heads() if not self._is_unseen(request)]
        return min(seen, key=lambda r: (self.served[r.user], r.order_key), default=None)

    def _is_unseen(self, request: Request) -> bool:
        return request.request_id in self._come or request.request_id in self._late

    def _see_arrivals(self) -> None:
        """Put requests that have arrived into their lines. A client of which none waited is lifted
        to the lowest counter of the others that wait.
        """
        seen = {**self._late}
        if self.options.sees_late and self.running:
            self._late, self._come = self._come, {}
        else:
            seen |= self._come
            self._late, self._come = {}, {}
        if not seen:
            return
        waiting = {request.user: request for request in self.waiting.heads()}
        present = {u: r for u, r in waiting.items() if not self._is_unseen(r)}
        standing = {u for u, r in present.items() if r.request_id not in seen}
        for request in seen.values():
            user = request.user
            if user not in standing and present.get(user) is request:
                others = [self.served[u] for u in standing if u != user]
                self.served[user] = max(self.served[user], min(others, default=0.0))
                standing.add(user)

    def _charge_for_ends(self, running: set[str]) -> None:
        """The artifact charges all that run once more whenever a request ends."""
        if self._ran - running:
            for request in self.running:
                self._charge(request.user, self.options.output_weight)

    def _charge(self, user: str, virtual_tokens: float) -> None:
        self.served[user] += virtual_tokens / self.options.weights.get(user, 1.0)
