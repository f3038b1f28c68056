"""As many prompt tokens per step as keep a target inter-token latency, from a model of step time.

No fixed chunk size is right (vllm#52906): with few decodes there is room for large chunks, with
many only for small ones. A model of step time is fitted online to measured steps (as in
FairBatching 2025), and each step takes the most prompt tokens whose predicted time is within
`target_itl`. Until there are enough measurements, the budget grows slowly and is halved when a step
was late. When no request decodes, prompts run at full speed. A lower target gives steadier streams,
later first tokens and less throughput. `order_by` names the policy whose order is used: any one
whose `order` needs no options.
"""

from functools import cached_property
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    BudgetPart,
    EngineCoreOutputs,
    ModelRunnerOutput,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    Step,
    load_policy,
)

INCREASE = 32  # prompt tokens by which the budget grows after a step in time, before the fit


class LatencyBudget(BudgetPart):
    """A budget of as many prompt tokens as keep a step with decodes within a time, predicted by
    `step_time`.
    """

    uses_step_time = True

    class Options(PolicyOptions):
        target_itl: PositiveFloat = 0.05  # seconds that a step with decodes should take at most
        min_prefill_tokens: PositiveInt = 16  # tokens of prompts per step at least

    def __init__(self, policy: BaseScheduler, options: Any) -> None:
        super().__init__(policy, options)
        self.trial_budget = 8 * INCREASE  # of prompt tokens, until the fit stands

    def for_prompts(self, step: Step, prompts: list[Request]) -> int:
        num_decodes = len(step.requests)
        if not num_decodes:
            return self.policy.max_num_batched_tokens
        budget, step_time = self.trial_budget, self.policy.step_time
        if step_time.is_fitted:
            num_context = sum(r.num_computed_tokens for r in step.requests + prompts)
            target = self.options.target_itl
            budget = step_time.max_prefill_tokens(target, num_decodes, num_context)
        return max(budget, int(self.options.min_prefill_tokens))

    def returned(self, output: SchedulerOutput) -> None:
        if self.policy.step_time.last_seconds > self.options.target_itl:
            self.trial_budget //= 2
        elif output.total_num_scheduled_tokens > len(output.num_scheduled_tokens):
            self.trial_budget += INCREASE  # only a step with prompt tokens says that more may do

    def gauges(self) -> dict[str, float]:
        """Return the budget for prompts until the fit stands, in tokens, and whether it does."""
        return {"trial_budget": self.trial_budget, "is_fitted": self.policy.step_time.is_fitted}


class LatencyBudgetScheduler(BaseScheduler):
    """Decodes, then prompt tokens while the step is predicted to meet the latency target."""

    admits_in_order = "all"
    uses_step_time = True

    class Options(LatencyBudget.Options):
        order_by: str = "fcfs"  # policy whose order is used for prompts

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = LatencyBudget(self, self.options)

    @classmethod
    def parse_options(cls, options: dict[str, Any]) -> PolicyOptions:
        parsed = super().parse_options(options)
        assert isinstance(parsed, cls.Options)
        load_policy(parsed.order_by)  # an unknown name is refused before anything is loaded
        return parsed

    def order(self, request: Request) -> Any:
        return self._order(self, request)

    @cached_property
    def _order(self) -> Any:
        return getattr(load_policy(self.options.order_by), "order", BaseScheduler.order)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        prompts = step.run_decodes()
        if not prompts and not self.waiting:
            return step.output()
        left = self.budget.for_prompts(step, prompts)
        for request in sorted(prompts, key=lambda r: r.order_key):
            left -= step.run(request, left)
        for request in self.waiting:
            granted = step.admit(request, left)
            if not granted:
                break
            left -= granted
        return step.output()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.budget.returned(scheduler_output)
        return outputs

    def gauges(self) -> dict[str, float]:
        return self.budget.gauges()
