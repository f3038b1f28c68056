"""Just enough service for each request, at the time when it counts (JITServe, once Tempo, NSDI'26).

Paper: Zhang et al., "Tempo: Application-aware LLM Serving with Mixed SLO Requirements", 2025, arXiv
2504.20068; JITServe, NSDI'26.

Aim: the most requests within mixed service levels: streams, deadlines, programs.

Says: a stream gains nothing from tokens that come before they are read, nor a deadline from an
early end. So each request gets the bandwidth that just meets its level, and the rest goes to the
requests for which it buys the most: the value of meeting the level over the work that is lacking.

Simplified: the value of each request is one. Lengths are predictions that come with the request;
the paper refines them as tokens come. A program's requests share the deadline that they state.

Cost: O(r) for r running requests; O(w log w) of w waiting ones compared, at most `window`.

Needs: levels as `slo_ttft` and `slo_tpot`, or a deadline of the request; with a deadline, predicted
lengths (hint `predicted_output_tokens`).
"""

from itertools import islice
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    RequestStatus,
    SchedulerOutput,
    hinted_number,
)


class JITServeScheduler(BaseScheduler):
    """Decodes that are due, then prompts by value over work, then decodes that are ahead."""

    uses_step_time = True

    class Options(PolicyOptions):
        ttft: PositiveFloat = 1.0  # seconds to the first token of a request that states none
        tpot: PositiveFloat = 0.1  # seconds for each token after it
        usual: PositiveFloat = 200.0  # tokens of a reply of which nothing is predicted
        margin: PositiveFloat = 1.0  # steps before it is due in which a token is computed
        patience: PositiveFloat = 10.0  # seconds of waiting after which a prompt goes first
        min_prefill_tokens: PositiveInt = 64  # tokens of prompts per step at least
        window: PositiveInt = 256  # waiting requests compared per step, oldest first

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.last: dict[Request, float] = {}  # when each running request was last served

    def schedule(self) -> SchedulerOutput:
        step, now, model = self.new_step(), self.clock(), self.step_time
        prefills = [r for r in self.running if r.is_prefill]
        if not prefills and not self.waiting:  # nothing to gain from holding back
            step.run_decodes()
            self.last.update(dict.fromkeys(step.requests, now))
            return step.output()
        horizon = now + self.options.margin * max(model.last_seconds, model.seconds_per_step)
        ahead: list[Request] = []
        slack = self.options.ttft / 8
        for request in self.running:
            if request.is_prefill:
                continue
            due = self.next_due(request, now)
            if due <= horizon:
                step.run(request)
                slack = min(slack, hinted_number(request, "slo_tpot", self.options.tpot))
            else:
                ahead.append(request)
                slack = min(slack, due - now)
        decodes = step.requests
        num_context = sum(r.num_computed_tokens for r in decodes)
        budget = model.max_prefill_tokens(slack, len(decodes), num_context)
        budget = max(budget, self.options.min_prefill_tokens)
        has_room = step.token_budget > 0 and len(self.running) < self.max_num_seqs
        window = list(islice(self.waiting, self.options.window if has_room else 1))
        may_admit = True
        for request in sorted(prefills + window, key=lambda r: self.rank(r, now)):
            if request.status is RequestStatus.RUNNING:
                budget -= step.run(request, budget)
            elif may_admit:  # no request passes one that does not fit, or it would never fit
                granted = step.admit(request, budget)
                budget -= granted
                may_admit = granted > 0
        if not step.requests:  # a step that no prompt can use is for those ahead
            for request in ahead:
                step.run(request)
        self.last.update(dict.fromkeys(step.requests, now))
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        self.last.pop(request, None)

    def next_due(self, request: Request, now: float) -> float:
        """Return when the next token has to be there, or be computed to meet the deadline."""
        if request.deadline is not None:
            length = hinted_number(request, "predicted_output_tokens", self.options.usual)
            left = max(length - request.num_output_tokens, 1.0)
            return now + (request.deadline - now) / left - self.step_time.last_seconds
        tpot = hinted_number(request, "slo_tpot", self.options.tpot)
        return self.last.get(request, now) + tpot

    def first_due(self, request: Request) -> float:
        due = request.arrival_time + hinted_number(request, "slo_ttft", self.options.ttft)
        return due if request.deadline is None else min(due, request.deadline)

    def rank(self, request: Request, now: float) -> tuple[int, float]:
        """Return the key: long waits, then requests in time by work and slack, then late ones."""
        done = request.num_computed_tokens or self.kv_cache.estimate_cached_tokens(request)
        work = (request.num_tokens - done) * self.step_time.seconds_per_prompt_token
        left = self.first_due(request) - now
        if now - request.arrival_time > self.options.patience or request.num_output_tokens:
            return 0, request.arrival_time
        return (1, work + left) if left >= work else (2, work)
