"""Evicts by steps to the next use in a workflow (KVFlow, NeurIPS'25).

Paper: Pan et al., "KVFlow: Efficient Prefix Caching for Accelerating LLM-Based Multi-Agent
Workflows", NeurIPS'25, arXiv 2507.07400.

Aim: prefixes of a workflow's agents are there when their turn comes.

Says: agents of a workflow take turns, so that the least recently used prefix is often the one that
is needed next. Each cached prefix has its steps to execution, the calls of the workflow until its
agent's next one, and the prefix with the most of them is evicted first; what no workflow needs goes
before all of them.

Simplified: steps are calls of the same program that end, as the client states them; the paper has a
graph of the workflow. Loading from host memory ahead of time is left out.

Cost: O(p log n) at the end of a request of a program with p cached prefixes, n cached blocks.

Needs: workflows (hint `program`) and `steps_to_next_use`, the calls of the program after which this
prefix is needed again; a request without it has no rank.
"""

import math
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveInt,
    Request,
    SchedulerOutput,
    hinted_number,
    hinted_text,
)


class KVFlowScheduler(BaseScheduler):
    """Order of arrival; the prefix that its workflow needs last is evicted first."""

    admits_in_order = "all"

    class Options(PolicyOptions):
        max_programs: PositiveInt = 1000  # workflows whose prefixes are followed, the latest
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # By client and workflow: calls until each prefix is needed again.
        self.programs: dict[tuple[str, str], dict[Request, float]] = {}

    def program(self, request: Request) -> tuple[str, str]:
        return request.user, hinted_text(request, "program")

    def retention(self, request: Request) -> float:
        return -self.programs.get(self.program(request), {}).get(request, math.inf)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        program = self.program(request)
        if not program[1]:
            return
        before = self.programs.pop(program, {})  # so that the newest stands last
        steps = {prefix: left - 1 for prefix, left in before.items()}
        steps[request] = hinted_number(request, "steps_to_next_use", -1.0)
        for prefix, left in steps.items():
            self.retain(prefix, -left if left >= 0 else -math.inf)
        if steps := {prefix: left for prefix, left in steps.items() if left >= 0}:
            self.programs[program] = steps
        if len(self.programs) > self.options.max_programs:
            for prefix in self.programs.pop(next(iter(self.programs))):
                self.retain(prefix, -math.inf)
