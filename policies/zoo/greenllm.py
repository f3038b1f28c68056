"""The card's clock follows queue and pace: tokens in time for fewer joules (GreenLLM, 2025).

Paper: Liu et al., "GreenLLM: SLO-Aware Dynamic Frequency Scaling for Energy-Efficient LLM Serving",
2025, arXiv 2508.16449; Yu et al., "VoltanaLLM: Feedback-Driven Frequency Control and State-Space
Routing for Energy-Efficient LLM Serving", 2025, arXiv 2509.04827.

Aim: fewer joules per token, with first tokens and streams still in time.

Says: at the highest clock a card draws the most power, and streams run ahead of what readers need.
For prompts, the clock is the one of least energy that serves the queue in time. For decodes, a
controller with hysteresis raises the clock a step when tokens come later than a target, and lowers
it a step when they come well before. GreenLLM reports up to 34% less energy with less than 3.5%
more violations of service levels, VoltanaLLM up to 36.3% less.

Simplified: a step has prompts and decodes, and one clock, the higher of what both ask for. The
clock for prompts is the lowest at which all that are there are computed before the oldest has
waited for `ttft`, by the step times learned so far, in the place of GreenLLM's fits of latency and
power. Left out: its queues by length, its slower second loop, which follows tokens per second, and
VoltanaLLM's routing. What a clock changes is assumed by the lab.

Cost: constant for each request that runs or enters.

Needs: nothing; a server needs `--runner simulated`, which alone has a clock to set.
"""

from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    EngineCoreOutputs,
    ModelRunnerOutput,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    Share,
)

STEP = 0.05  # of the clock, by which the controller raises or lowers it
LEAST_FOR_PROMPTS = 0.6  # of the clock: below it a prompt takes more energy again
LEAST_FOR_DECODES = 0.4  # of the clock


class GreenLLMScheduler(BaseScheduler):
    """Decodes, then prompts by arrival, at the lowest clock that keeps both in time."""

    uses_step_time = True
    sets_frequency = True
    admits_in_order = "all"

    class Options(PolicyOptions):
        ttft: PositiveFloat = 0.5  # seconds in which a prompt should be computed
        tpot: PositiveFloat = 0.04  # seconds that a step with decodes should take at most
        calm: Share = 0.7  # share of `tpot` below which the clock goes down
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pace = 1.0  # share of the clock that decodes ask for
        self.clock_share = 1.0  # share of the clock that was set last
        self.decoding: set[int] = set()  # ids of steps with decodes that are not back yet

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        prompts = step.run_decodes()
        if step.requests:
            self.decoding.add(step.step_id)
        self.clock_share = max(self.pace, self.for_prompts(prompts))
        self.set_frequency(self.clock_share)
        for request in prompts:
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        returned = scheduler_output.step_id
        if returned in self.decoding:
            self.control()
        self.decoding = {step_id for step_id in self.decoding if step_id > returned}
        return outputs

    def control(self) -> None:
        """Raise the clock of decodes after a step that was too slow, lower it after a quick one."""
        options, seconds = self.options, self.step_time.last_seconds
        if seconds > options.tpot:
            self.pace = min(self.pace + STEP, 1.0)
        elif 0 < seconds < options.calm * options.tpot:
            self.pace = max(self.pace - STEP, LEAST_FOR_DECODES)

    def for_prompts(self, running: list[Request]) -> float:
        """Return the lowest share of the clock at which all prompts are computed in time; 0 if
        there are none.
        """
        oldest = running[0] if running else next(iter(self.waiting), None)
        if oldest is None:
            return 0.0
        tokens = (
            sum(r.num_tokens - r.num_computed_tokens for r in running) + self.waiting.num_tokens
        )
        at_full_clock = tokens * self.step_time.seconds_per_prompt_token * self.clock_share
        left = self.options.ttft - (self.clock() - oldest.arrival_time)
        return min(max(at_full_clock / left, LEAST_FOR_PROMPTS), 1.0) if left > 0 else 1.0
