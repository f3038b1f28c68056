"""Least attained service of the whole program first (Autellix, later Agentix, NSDI'26).

Paper: Luo et al., "Autellix: An Efficient Serving Engine for LLM Agents as General Programs", 2025,
arXiv 2502.13965.

Aim: programs of many calls end early, short programs first.

Says: a call's place in line follows from the service that its program has had, not from its own.
A program that runs calls side by side counts the longest chain of them (ATLAS). Levels double in
size, a call sinks as it is served, and calls of upper levels take the place of lower ones.

Simplified: service is counted in tokens, not seconds. The paper swaps out what it displaces; here
it is computed again, `max_preemptions` times at most. The paper lifts a program to the top once it
has waited long for its service; here waiting lifts a call to the top within `starve_after` seconds.

Cost: O(log n) for each request that enters a queue of n; O(r log r) of r running requests in steps
in which a request waits for a place.

Needs: programs (hint `program`, else `session`); a request without one is a program of its own.
"""

from collections.abc import Iterator
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    hinted_text,
)

MAX_PROGRAMS = 4096  # whose service is remembered, the latest


class AutellixScheduler(BaseScheduler):
    """Decodes, running prompts, then calls of the programs that were served least."""

    admits_in_order = "all"
    keeps_decoding = True

    class Options(PolicyOptions):
        quantum: PositiveInt = 1024  # service in the top level, in prompt tokens; doubles per level
        num_levels: PositiveInt = 8  # of service
        output_weight: PositiveFloat = 8.0  # an output token holds a seat for a whole step
        starve_after: PositiveFloat = 20.0  # seconds that lift the lowest level to the top
        max_preemptions: PositiveInt = 1  # of one request, to make room for upper levels
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.served: dict[tuple[str, str], float] = {}  # by program: its longest chain that ended
        self.before: dict[Request, float] = {}  # what the program had when the request came
        self.calls: dict[tuple[str, str], set[Request]] = {}  # by program: those in `before`

    def program(self, request: Request) -> tuple[str, str]:
        name = hinted_text(request, "program") or hinted_text(request, "session")
        return request.user, name or f"request {request.request_id}"

    def own(self, request: Request) -> float:
        """Return the service of the request itself, in prompt tokens."""
        return request.num_prompt_tokens + self.options.output_weight * request.num_output_tokens

    def level(self, request: Request) -> int:
        options = self.options
        served = self.before.get(request, 0.0) + self.own(request)
        return min(int(served / options.quantum).bit_length(), options.num_levels - 1)

    def order(self, request: Request) -> float:
        """Return the time at which waiting will have lifted the request to the top level."""
        if request not in self.before:
            calls = self.calls.setdefault(self.program(request), set())
            for ended in [call for call in calls if call.status.is_finished]:
                self.settle(ended)  # it came before the step that would tell of the end
            self.before[request] = self.served.get(self.program(request), 0.0)
            self.calls.setdefault(self.program(request), calls).add(request)
        share = self.level(request) / max(self.options.num_levels - 1, 1)
        return self.clock() + share * self.options.starve_after

    def lowness(self, request: Request) -> tuple[int, Any]:
        return self.level(request), request.order_key

    def victim(self) -> Request | None:
        return max(self.running, key=self.lowness, default=None)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        lowest: list[Request] | None = None
        for request in self.waiting:
            if lowest is None:  # not those that this step admits: they would go round in circles
                lowest = sorted(self.running, key=self.lowness, reverse=True)
            if not step.admit(request, displacing=self.lower(request, lowest)):
                break
        return step.output()

    def lower(self, request: Request, running: list[Request]) -> Iterator[Request]:
        """Return running requests of lower levels than the waiting one's, the lowest first."""
        level, most = self.level(request), self.options.max_preemptions
        return (r for r in running if self.level(r) > level and r.num_preemptions < most)

    def on_finish(self, request: Request, reason: str) -> None:
        if request in self.before:
            self.settle(request)

    def settle(self, request: Request) -> None:
        """Count an ended call for its program."""
        program, served = self.program(request), self.before.pop(request) + self.own(request)
        self.calls[program].discard(request)
        if not self.calls[program]:
            del self.calls[program]
        self.served[program] = max(self.served.pop(program, 0.0), served)
        if len(self.served) > MAX_PROGRAMS:
            del self.served[next(iter(self.served))]
