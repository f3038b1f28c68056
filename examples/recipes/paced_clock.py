"""A card's clock: it follows the pace of tokens, so that streams are in time with fewer joules.

Prompts that have waited get the highest clock. Else the clock goes up a step after a step that took
longer than `tpot`, and down a step after one that took less than a share of that (the decode loop
of GreenLLM, Liu et al., arXiv 2508.16449, 2025; its prompts and decodes have clocks of their own).
"""

from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    SchedulerOutput,
)

STEP = 0.05  # share of the clock by which it goes up or down


class PacedClockScheduler(BaseScheduler):
    """Decodes, then prompts by arrival, at the lowest clock that keeps the pace."""

    uses_step_time = True
    sets_frequency = True

    class Options(PolicyOptions):
        tpot: PositiveFloat = 0.04  # seconds that a step should take at most
        calm: PositiveFloat = 0.7  # share of `tpot` below which the clock goes down
        queue: NonNegativeFloat = 0.2  # seconds of waiting from which it is the highest
        least: PositiveFloat = 0.4  # share of the highest clock that it never leaves

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.share = 1.0

    def schedule(self) -> SchedulerOutput:
        oldest = next(iter(self.waiting), None)
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        options, seconds = self.options, self.step_time.last_seconds
        if seconds > options.tpot:
            self.share = min(self.share + STEP, 1.0)
        elif 0 < seconds < options.calm * options.tpot:
            self.share = max(self.share - STEP, options.least)
        is_late = oldest is not None and self.clock() - oldest.arrival_time > options.queue
        self.set_frequency(1.0 if is_late else self.share)
        return step.output()
