"""Deadlines for the first token, and a pace for those that follow; the hopeless step aside.

A prompt that cannot be in time any more, even if served at once, is relegated: served after all
others, so that one late request does not make the next one late. Among the rest the earliest
deadline goes first, with a bonus for short work (QoServe/Niyama, ASPLOS'26). A step may take as
long as the stream closest to falling behind its pace allows: those ahead lend time to prompts
(FairBatching, 2025). A request's own `deadline` counts if earlier, and lends nothing. More are in
time under overload; the late get later still. Costs 3 us a compared request, and hardly
anything for those that are surely late.
"""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    RequestStatus,
    SchedulerOutput,
    Step,
    WaitReason,
)


class DeadlineScheduler(BaseScheduler):
    """Decodes, then prompts that can be in time, then those that cannot."""

    uses_step_time = True

    class Options(PolicyOptions):
        ttft: PositiveFloat = 1.0  # seconds from arrival to the first token
        tpot: PositiveFloat = 0.05  # seconds for each token after it
        relegate: bool = True  # serve prompts that cannot make it after all others
        short_first: NonNegativeFloat = 1.0  # seconds that a second less of work is worth; 0: EDF
        min_prefill_tokens: PositiveInt = 64  # prompts get so much, however late the streams are
        window: PositiveInt = 256  # waiting requests compared per step, earliest deadline first

    def order(self, request: Request) -> float:
        """When the first token is due."""
        due: float = request.arrival_time + self.options.ttft
        return due if request.deadline is None else min(due, request.deadline)

    def group_by(self, request: Request) -> str:
        """The preempted may be half-way in their output, and count as in time however late."""
        return "preempted" if request.status is RequestStatus.PREEMPTED else ""

    def schedule(self) -> SchedulerOutput:
        step, now, model, tpot = self.new_step(), self.clock(), self.step_time, self.options.tpot
        step.run_decodes()
        decodes = step.requests
        num_decodes, num_context = len(decodes), sum(r.num_computed_tokens for r in decodes)
        next_due = now + self.options.ttft / 8  # a guess: newcomers must wait for a step's end
        for request in decodes:
            due = request.order_key[0] + tpot * request.num_output_tokens
            next_due = min(next_due, due if request.deadline is None else now)
        budget = model.max_prefill_tokens(max(tpot, next_due - now), num_decodes, num_context)
        budget = max(budget, self.options.min_prefill_tokens)
        speed = budget / model.seconds(budget, num_decodes, num_context + budget)
        may_admit = True
        for request in self.rank(now, speed, step):
            if request.status is RequestStatus.RUNNING:
                budget -= step.run(request, budget)
            elif may_admit:  # no request passes one that does not fit, or it would never fit
                granted = step.admit(request, budget)
                budget -= granted
                may_admit = granted > 0
        return step.output()

    def rank(self, now: float, speed: float, step: Step) -> list[Request]:
        """Prompts that can be in time, then late ones; `speed` is in prompt tokens a second."""
        in_time: list[tuple[float, Any, Request]] = []
        late: list[Request] = []
        num_cached = self.kv_cache.estimate_cached_tokens
        has_room = step.token_budget > 0 and len(self.running) < self.max_num_seqs
        waiting = self.prospects(now, late)
        if not has_room:
            waiting = islice(waiting, 1)  # the first hears why it waits
        for request in chain([r for r in self.running if r.is_prefill], waiting):
            left = request.order_key[0] + self.options.tpot * request.num_output_tokens - now
            done = request.num_computed_tokens or (num_cached(request) if left > 0 else 0)
            work = (request.num_tokens - done) / speed
            # A request preempted half-way is late for its next token, but not relegated.
            if left >= work or request.num_output_tokens or not self.options.relegate:
                in_time.append((left + self.options.short_first * work, request.order_key, request))
                if len(in_time) >= self.options.window:
                    break
            elif len(late) < self.options.window:
                late.append(request)
                step.hold(request, WaitReason.DEADLINE)
        return [request for _, _, request in sorted(in_time)] + late

    def prospects(self, now: float, late: list[Request]) -> Iterator[Request]:
        """Waiting requests, earliest deadline first; those that are surely late are passed over
        once a window of `late` ones is known.
        """
        for request in self.waiting:
            if len(late) >= self.options.window and request.order_key[0] < now:
                break
            yield request
        else:
            return
        for other in self.waiting.group("preempted"):
            if request.order_key <= other.order_key < (now,):
                yield other
        yield from self.waiting.from_key(now)
