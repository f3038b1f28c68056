"""A policy put together of parts: order, budget, admission, victims. Each is named in the options.

For example, `order: {part: fair}`, `budget: {part: latency_budget}` and
`admission: [{part: deadline}]` combine a fair order, a latency budget and deadlines for admission,
without a class for it. Decodes run first; then prompts run in the chosen order, within the budget.
A waiting prompt is admitted if every admission part agrees. If a request does not fit, no later one
overtakes it, because it might otherwise never fit. Name a part by the policy whose file defines it,
by `file.py:Class`, by `package.module:Class`, or by an entry point of `aioserve.parts`.
"""

from collections.abc import Iterable
from typing import Any

from aioserve.scheduler import (
    AdmissionPart,
    BaseScheduler,
    BudgetPart,
    EngineCoreOutputs,
    ModelRunnerOutput,
    OrderPart,
    Part,
    PolicyOptions,
    PositiveInt,
    Request,
    RequestStatus,
    SchedulerOutput,
    Step,
    Verdict,
    VictimPart,
    read_part,
)

PartSpec = str | dict[str, Any]  # a name, or `part: name` and the options of the part


class ComposedScheduler(BaseScheduler):
    """Decodes, then prompts as parts of the policy say: order, budget, admission, victims."""

    class Options(PolicyOptions):
        order: PartSpec = "arrival"  # which prompt goes first
        budget: PartSpec = "chunk"  # how many tokens and requests a step carries
        admission: list[PartSpec] = []  # noqa: RUF012 - which requests may be admitted; all must agree
        victim: PartSpec | None = None  # which request gives way (default: the last in order)
        window: PositiveInt = 256  # waiting requests that admissions are asked about per step

    options: Options

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        named = self.read_parts(config.options)
        self.uses_step_time = any(part.uses_step_time for part, _ in named)
        super().__init__(config, *args, **kwargs)
        self.parts: list[Part] = [part(self, options) for part, options in named]
        order, budget = self.parts[:2]
        assert isinstance(order, OrderPart)
        assert isinstance(budget, BudgetPart)
        self.first, self.budget = order, budget
        self.doors = [part for part in self.parts if isinstance(part, AdmissionPart)]
        self.victims = next((p for p in self.parts if isinstance(p, VictimPart)), None)
        self.admits_in_order = None if self.doors else order.admits_in_order
        self.reorder_every = order.reorder_every
        self._notes_decodes = type(order).decoded is not OrderPart.decoded

    @classmethod
    def read_parts(cls, options: dict[str, Any]) -> list[tuple[type[Part], PolicyOptions]]:
        """Return the parts, order and budget first. Raises `ConfigError` that names the part."""
        parsed = super().parse_options(options)
        assert isinstance(parsed, cls.Options)
        where = f"policy {cls.__name__}, options."
        return [
            read_part(parsed.order, OrderPart, where + "order"),
            read_part(parsed.budget, BudgetPart, where + "budget"),
            *(
                read_part(spec, AdmissionPart, f"{where}admission[{i}]")
                for i, spec in enumerate(parsed.admission)
            ),
            *(
                read_part(spec, VictimPart, where + "victim")
                for spec in [parsed.victim]
                if spec is not None
            ),
        ]

    @classmethod
    def parse_options(cls, options: dict[str, Any]) -> PolicyOptions:
        cls.read_parts(options)  # a part that is not there is refused before anything is loaded
        return super().parse_options(options)

    def order(self, request: Request) -> Any:
        return self.first.key(request)

    def group_by(self, request: Request) -> str:
        return self.first.group(request)

    def victim(self) -> Request | None:
        return super().victim() if self.victims is None else self.victims.victim()

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.budget.num_tokens(), self.budget.max_requests())
        self.first.begin()
        prompts = step.run_decodes()
        if self._notes_decodes:
            self.first.decoded(step.requests)
        if prompts or self.waiting:
            self.serve(step, prompts, self.budget.for_prompts(step, prompts))
        return step.output()

    def serve(self, step: Step, prompts: list[Request], left: int | None) -> None:
        """Run prompts and admit requests until `left` tokens are gone, or one does not fit."""
        for door in self.doors:
            door.begin(step, left)
        num_to_come, num_asked, may_admit = len(prompts), 0, True
        running, last = set(prompts), []
        for request in self.first.line(step, prompts, left):
            granted = 0
            if request in running:
                num_to_come -= 1
                granted = step.run(request, left)
            elif may_admit and request.status is not RequestStatus.RUNNING:
                num_asked += 1
                verdict = self.ask(request, step)
                if verdict == "admit":
                    granted = step.admit(request, left, displacing=self.displaceable(request))
                    may_admit = granted > 0
                elif verdict == "last":
                    last.append(request)
            if granted:
                self.first.served(request, granted)
                left = None if left is None else left - granted
            elif not num_to_come and (not may_admit or num_asked >= self.options.window):
                break
        for request in last if may_admit else []:
            granted = step.admit(request, left)
            if not granted:
                break
            self.first.served(request, granted)
            left = None if left is None else left - granted

    def ask(self, request: Request, step: Step) -> Verdict:
        """Return what all admissions say: the first that does not admit the request decides."""
        for door in self.doors:
            if (verdict := door.ask(request, step)) != "admit":
                if verdict not in ("last", "hold"):
                    raise ValueError(
                        f"{type(door).__name__}.ask() must return 'admit', 'last' or 'hold', got "
                        f"{verdict!r:.80}"
                    )
                return verdict
        return "admit"

    def displaceable(self, request: Request) -> Iterable[Request]:
        return () if self.victims is None else self.victims.displaceable(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.budget.returned(scheduler_output)
        return outputs

    def on_finish(self, request: Request, reason: str) -> None:
        for part in self.parts:
            part.on_finish(request, reason)

    def gauges(self) -> dict[str, float]:
        """Return those of the parts, each with the kind of its part before its name."""
        return {
            f"{part.kind}_{name}": value
            for part in self.parts
            for name, value in part.gauges().items()
        }
