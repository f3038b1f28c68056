"""Small policies that a claim needs and that nothing else does: victims, shortest prompts first."""

import random
from typing import Any, Literal

from aioserve.scheduler import BaseScheduler, PolicyOptions, Request, SchedulerOutput


class _Plain(BaseScheduler):
    """Decodes, running prompts, then prompts in order, in pieces: as vLLM has it since 2025."""

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()


class VictimScheduler(_Plain):
    """First come, first served; an option says which request is preempted."""

    class Options(PolicyOptions):
        rule: Literal["lifo", "random", "most_computed", "least_computed"] = "lifo"
        seed: int = 0

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rng = random.Random(self.options.seed)

    def victim(self) -> Request | None:
        running, rule = self.running, self.options.rule
        if not running:
            return None
        if rule == "random":
            return self.rng.choice(running)
        if rule == "lifo":
            return running[-1]
        pick = max if rule == "most_computed" else min
        return pick(running, key=lambda r: (r.num_computed_tokens, r.order_key))


class ShortestPromptScheduler(_Plain):
    """The shortest prompt goes first."""

    def order(self, request: Request) -> int:
        return request.num_prompt_tokens
