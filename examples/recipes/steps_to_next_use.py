"""Steps to next use: of a workflow's prefixes, the one that is needed last is evicted first.

The agents of a workflow take turns, in an order that the workflow knows. Each request has the hint
`program`, and `steps_to_next_use`: how many requests of the program end before its prefix is needed
again. Whenever one ends, all prefixes of its program are one step nearer, and `retain` updates
their ranks. This is KVFlow (Pan et al., 2025) without prefetching.
"""

import math
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveInt,
    Request,
    SchedulerOutput,
)


class StepsToNextUseScheduler(BaseScheduler):
    """Order of arrival; the prefix that is needed in the most steps is evicted first."""

    class Options(PolicyOptions):
        programs: PositiveInt = 1000  # most programs whose prefixes are followed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.programs: dict[object, dict[Request, float]] = {}  # steps to the next use of each

    def retention(self, request: Request) -> float:
        return -self.programs.get(self.program(request), {}).get(request, math.inf)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()

    def program(self, request: Request) -> object:
        """Clients may choose the same names."""
        return request.user, request.hints.get("program")

    def on_finish(self, request: Request, reason: str) -> None:
        steps = self.programs.pop(self.program(request), {})  # the newest stands last
        nearer = {parked: left - 1 for parked, left in steps.items()}
        stated = request.hints.get("steps_to_next_use")
        if isinstance(stated, int | float):
            nearer[request] = stated
        for parked, left in nearer.items():
            self.retain(parked, -left if left >= 0 else -math.inf)
        if kept := {parked: left for parked, left in nearer.items() if left >= 0}:
            self.programs[self.program(request)] = kept
        if len(self.programs) > self.options.programs:
            for parked in self.programs.pop(next(iter(self.programs))):
                self.retain(parked, -math.inf)
