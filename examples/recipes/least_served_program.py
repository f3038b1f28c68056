"""Attained service by program: calls of the program with the least service go first.

A program is a set of calls with the same hint `program`. Its key is the service of all its calls so
far, so the keys of its waiting calls change when one ends. `group_by` groups the queue by program,
and `reorder_all` moves all calls of a program at once. This is a simple form of PLAS (Autellix, Luo
et al., 2025). `max_requests` limits the number of requests in a step, independent of the seats.
"""

from collections import Counter
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveInt,
    Request,
    SchedulerOutput,
)

MAX_PROGRAMS = 10_000  # whose service is kept


class LeastServedProgramScheduler(BaseScheduler):
    """Decodes and running prompts, then the first call of the program that was served least."""

    admits_in_order = "all"

    class Options(PolicyOptions):
        max_requests: PositiveInt | None = None  # per step (default: every running request)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.served: Counter[str] = Counter()  # tokens of calls that have ended, by program

    def group_by(self, request: Request) -> str:
        """The program; a request without one is a program of its own."""
        return str(request.hints.get("program", request.request_id))

    def order(self, request: Request) -> tuple[int, float]:
        return self.served[self.group_by(request)], request.arrival_time

    def on_finish(self, request: Request, reason: str) -> None:
        if "program" in request.hints:
            program = self.group_by(request)
            self.served[program] += request.num_tokens
            if len(self.served) > MAX_PROGRAMS:
                del self.served[next(iter(self.served))]  # the one that came first
            self.reorder_all(self.waiting.group(program))

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(max_requests=self.options.max_requests)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
