"""Skip-join multi-level feedback queue (FastServe, NSDI'26): the least served first, unpredicted.

A request's level follows from what it was served: its prompt counts at once, so a long one skips
the upper levels, and each output token counts like `output_weight` prompt tokens, so it sinks as
it goes on; levels double in size. Upper levels go first, and take seats and blocks from lower
ones. Waiting lifts a request in line, from the lowest level to the top in `starve_after` seconds.
Short answers come back much sooner, without guessing lengths; long ones are put off, and may be
computed again: at most `max_preemptions` times for the sake of others, so that no request is
preempted for ever. Costs half a microsecond per running request in steps where one waits in vain.
"""

from itertools import islice
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    Step,
)


class MLFQScheduler(BaseScheduler):
    """Decodes, then prompts by level and age; a waiting upper level displaces a lower one."""

    keeps_decoding = True

    class Options(PolicyOptions):
        quantum: PositiveInt = 512  # service in the top level, in prompt tokens; doubles per level
        num_levels: PositiveInt = 6
        output_weight: PositiveFloat = 8.0  # an output token holds a seat for a whole step
        starve_after: PositiveFloat = 10.0  # seconds that lift the lowest level to the top
        max_preemptions: PositiveInt = 3  # of one request, to make room for upper levels
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)
        window: PositiveInt = 128  # waiting requests examined per step

    options: Options

    def level(self, request: Request) -> int:
        options = self.options
        served = request.num_prompt_tokens + options.output_weight * request.num_output_tokens
        return min(int(served / options.quantum).bit_length(), options.num_levels - 1)

    def order(self, request: Request) -> float:
        """When it will have been lifted to the top; set whenever it enters the queue."""
        share = self.level(request) / max(self.options.num_levels - 1, 1)
        return self.clock() + share * self.options.starve_after

    def victim(self) -> Request | None:
        return max(self.running, key=self.lowness, default=None)

    def lowness(self, request: Request) -> tuple[int, Any]:
        return (self.level(request), request.order_key)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        prefills = step.run_decodes()
        waiting = list(islice(self.waiting, self.options.window))
        limit = self.options.max_preemptions
        # Not those that come in by this step: they would be thrown out of every step again.
        victims = [r for r in self.running if r.num_preemptions < limit] if waiting else []
        entering = set(waiting)
        blocked_level = self.options.num_levels
        for request in sorted(prefills + waiting, key=lambda r: r.order_key):
            if request not in entering:
                step.run(request)
            elif self.level(request) < blocked_level and not self.admit(step, request, victims):
                # Only upper levels may pass one that does not fit; none, if it was lifted.
                is_lifted = request.order_key[0] <= self.clock()
                blocked_level = 0 if is_lifted else self.level(request)
        return step.output()

    def admit(self, step: Step, request: Request, victims: list[Request]) -> bool:
        """Let a request in, in the place of lower levels if there is no other."""
        level = self.level(request)
        lower = sorted((v for v in victims if self.level(v) > level), key=self.lowness)
        return step.admit(request, displacing=reversed(lower)) > 0
