"""Deadlines for the first token, and a pace for those that follow; the hopeless step aside.

A prompt that can no longer meet its deadline, even if served at once, is relegated: it is served
after all others, so that one late request does not make the next one late. Among the rest the
earliest deadline goes first, with a bonus for short work (QoServe/Niyama, ASPLOS'26). A step may
take as long as the stream with the least slack allows: streams ahead of their pace leave time for
prompts (FairBatching, 2025). A request's own `deadline` counts if it is earlier, and leaves no time
for prompts. Under overload more requests are in time, but late requests become even later. A step
costs about 3 us per request that it compares, and almost nothing for requests that are certainly
late.
"""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, Literal

from aioserve.scheduler import (
    AdmissionPart,
    BaseScheduler,
    BudgetPart,
    NonNegativeFloat,
    OrderPart,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    RequestStatus,
    SchedulerOutput,
    Step,
    Verdict,
    WaitReason,
)


class Due(PolicyOptions):
    """The time at which a first token is due."""

    ttft: PositiveFloat = 1.0  # seconds from arrival to the first token


def first_due(request: Request, ttft: float) -> float:
    """Return when the first token is due: `ttft` seconds after the arrival, or at the deadline."""
    due = request.arrival_time + ttft
    return due if request.deadline is None else min(due, request.deadline)


def prompt_speed(policy: BaseScheduler, step: Step, num_tokens: int) -> float:
    """Prompt tokens a second in a step of the decodes that it has and `num_tokens` of prompts."""
    decodes = step.requests
    num_context = sum(r.num_computed_tokens for r in decodes)
    seconds = policy.step_time.seconds(num_tokens, len(decodes), num_context + num_tokens)
    return num_tokens / seconds


class DeadlineOrder(OrderPart):
    """Prompts that can be in time, then those that cannot."""

    admits_in_order = None
    uses_step_time = True

    class Options(Due):
        tpot: PositiveFloat = 0.05  # seconds for each token after it
        relegate: bool = True  # serve prompts that cannot make it after all others
        short_first: NonNegativeFloat = 1.0  # seconds that a second less of work is worth; 0: EDF
        window: PositiveInt = 256  # waiting requests compared per step, earliest deadline first

    def key(self, request: Request) -> float:
        return first_due(request, self.options.ttft)

    def group(self, request: Request) -> str:
        """The preempted may be half-way in their output, and count as in time however late."""
        return "preempted" if request.status is RequestStatus.PREEMPTED else ""

    def line(self, step: Step, prompts: list[Request], num_tokens: int | None) -> Iterator[Request]:
        if num_tokens is None:
            num_tokens = step.token_budget
        speed = prompt_speed(self.policy, step, max(num_tokens, 1))
        return iter(self.rank(self.policy.clock(), speed, step))

    def rank(self, now: float, speed: float, step: Step) -> list[Request]:
        """Prompts that can be in time, then late ones; `speed` is in prompt tokens a second."""
        policy, options = self.policy, self.options
        in_time: list[tuple[float, Any, Request]] = []
        late: list[Request] = []
        num_cached = policy.kv_cache.estimate_cached_tokens
        has_room = step.token_budget > 0 and len(policy.running) < policy.max_num_seqs
        waiting = self.prospects(now, late)
        if not has_room:
            waiting = islice(waiting, 1)  # the first hears why it waits
        for request in chain([r for r in policy.running if r.is_prefill], waiting):
            left = request.order_key[0] + options.tpot * request.num_output_tokens - now
            done = request.num_computed_tokens or (num_cached(request) if left > 0 else 0)
            work = (request.num_tokens - done) / speed
            # A request preempted half-way is late for its next token, but not relegated.
            if left >= work or request.num_output_tokens or not options.relegate:
                in_time.append((left + options.short_first * work, request.order_key, request))
                if len(in_time) >= options.window:
                    break
            elif len(late) < options.window:
                late.append(request)
                step.hold(request, WaitReason.DEADLINE)
        return [request for _, _, request in sorted(in_time)] + late

    def prospects(self, now: float, late: list[Request]) -> Iterator[Request]:
        """Waiting requests, earliest deadline first; those that are surely late are passed over
        once a window of `late` ones is known.
        """
        queue = self.policy.waiting
        for request in queue:
            if len(late) >= self.options.window and request.order_key[0] < now:
                break
            yield request
        else:
            return
        for other in queue.group("preempted"):
            if request.order_key <= other.order_key < (now,):
                yield other
        yield from queue.from_key(now)


class PaceBudget(BudgetPart):
    """A step as long as the stream closest to falling behind its pace allows."""

    uses_step_time = True

    class Options(Due):
        tpot: PositiveFloat = 0.05  # seconds for each token after it
        min_prefill_tokens: PositiveInt = 64  # tokens of prompts per step at least

    def for_prompts(self, step: Step, prompts: list[Request]) -> int:
        now, ttft, tpot = self.policy.clock(), self.options.ttft, self.options.tpot
        decodes = step.requests
        num_context = sum(r.num_computed_tokens for r in decodes)
        next_due = now + ttft / 8  # a guess: newcomers must wait for a step's end
        for request in decodes:
            due = request.arrival_time + ttft + tpot * request.num_output_tokens
            next_due = min(next_due, due if request.deadline is None else now)
        seconds = max(tpot, next_due - now)
        budget = self.policy.step_time.max_prefill_tokens(seconds, len(decodes), num_context)
        return max(budget, int(self.options.min_prefill_tokens))


class DeadlineAdmission(AdmissionPart):
    """Requests that cannot have their first token in time come last, or are turned away."""

    uses_step_time = True

    class Options(Due):
        late: Literal["last", "reject"] = "last"  # what is done with a request that is late

    def begin(self, step: Step, num_tokens: int | None) -> None:
        num_tokens = step.token_budget if num_tokens is None else num_tokens
        self.now, self.speed = self.policy.clock(), 0.0
        if self.policy.waiting:
            self.speed = prompt_speed(self.policy, step, max(num_tokens, 1))

    def ask(self, request: Request, step: Step) -> Verdict:
        """Return the verdict by the model of step time; until it is fitted, no request is turned
        away.
        """
        left = first_due(request, self.options.ttft) - self.now
        num_cached = self.policy.kv_cache.estimate_cached_tokens(request) if left > 0 else 0
        work = (request.num_tokens - num_cached) / self.speed
        if left >= work or request.num_output_tokens:
            return "admit"
        step.hold(request, WaitReason.DEADLINE)
        if self.options.late == "reject" and self.policy.step_time.is_fitted:
            missed = work - left
            reason = f"the first token would come {missed:.1f} s too late"
            if step.reject(request, reason, retry_after=missed):
                return "hold"
        return "last"


class DeadlineScheduler(BaseScheduler):
    """Decodes, then prompts that can be in time, then those that cannot."""

    uses_step_time = True

    class Options(DeadlineOrder.Options):
        min_prefill_tokens: PositiveInt = 64  # tokens of prompts per step at least

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.deadlines, self.pace = (
            DeadlineOrder(self, self.options),
            PaceBudget(self, self.options),
        )

    def order(self, request: Request) -> float:
        """Return when the first token is due."""
        return self.deadlines.key(request)

    def group_by(self, request: Request) -> str:
        return self.deadlines.group(request)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        prompts = step.run_decodes()
        if not prompts and not self.waiting:
            return step.output()
        budget = self.pace.for_prompts(step, prompts)
        may_admit = True
        for request in self.deadlines.line(step, prompts, budget):
            if request.status is RequestStatus.RUNNING:
                budget -= step.run(request, budget)
            elif may_admit:  # no request passes one that does not fit, or it would never fit
                granted = step.admit(request, budget)
                budget -= granted
                may_admit = granted > 0
        return step.output()
