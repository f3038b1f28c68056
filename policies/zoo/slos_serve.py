"""Plans which requests can all meet their levels, and defers the rest (SLOs-Serve, 2025).

Paper: Chen et al., "SLOs-Serve: Optimized Serving of Multi-SLO LLMs", 2025, arXiv 2504.08784.

Aim: admitted requests meet their levels, through bursts.

Says: a planner chooses the tokens of the next batches so that the most requests meet the limits of
their stages, prefill and decode. Decodes of a loose pace skip batches. Those that cannot be
guaranteed are declined softly: they wait as best-effort work until there is room for them.

Simplified: the paper's dynamic program over batches is Moore and Hodgson's rule here, which is
optimal for requests of equal value on one engine: in order of deadlines, the longest prompt is
declined whenever one would be late. Draft lengths and other replicas are left out.

Cost: O(r) for r running requests; O(w log w) of w waiting ones compared, at most `window`.

Needs: levels as `slo_ttft` and `slo_tpot`; a request without has those of the options.
"""

from heapq import heappop, heappush
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
    WaitReason,
    hinted_number,
)


class SLOsServeScheduler(BaseScheduler):
    """Decodes that are due, the prompts of the plan by deadline, then best-effort work."""

    uses_step_time = True

    class Options(PolicyOptions):
        ttft: PositiveFloat = 1.0  # seconds to the first token of a request that states none
        tpot: PositiveFloat = 0.05  # seconds for each token after it
        min_prefill_tokens: PositiveInt = 64  # tokens of prompts per step at least
        window: PositiveInt = 256  # waiting requests planned per step, earliest deadline first

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.last: dict[Request, float] = {}  # when each running request was last served

    def order(self, request: Request) -> float:
        """Return when the first token is due."""
        return request.arrival_time + hinted_number(request, "slo_ttft", self.options.ttft)

    def pace(self, request: Request) -> float:
        """Return seconds for each token after the first."""
        return hinted_number(request, "slo_tpot", self.options.tpot)

    def schedule(self) -> SchedulerOutput:
        step, now, model = self.new_step(), self.clock(), self.step_time
        prefills = [r for r in self.running if r.is_prefill]
        decodes = [r for r in self.running if not r.is_prefill]
        pace = min(map(self.pace, decodes), default=self.options.ttft / 8)
        busy = bool(prefills or self.waiting)
        next_batch = now + max(model.last_seconds, model.seconds_per_step)
        for request in decodes:
            due = self.last.get(request, now) + self.pace(request)
            if not busy or due <= next_batch:  # it may not skip this batch
                step.run(request)
        num_context = sum(r.num_computed_tokens for r in step.requests)
        num_decodes = len(step.requests)
        budget = model.max_prefill_tokens(pace, num_decodes, num_context)
        budget = min(max(budget, self.options.min_prefill_tokens), self.max_num_batched_tokens)
        speed = budget / model.seconds(budget, num_decodes, num_context + budget)
        has_room = step.token_budget > 0 and len(self.running) < self.max_num_seqs
        waiting = list(islice(self.waiting, self.options.window if has_room else 1))
        planned, declined = self.plan(prefills, waiting, now, speed)
        for request in declined:
            step.hold(request, WaitReason.DEADLINE)
        may_admit = True
        for request in planned + declined:
            if request.status is RequestStatus.RUNNING:
                budget -= step.run(request, budget)
            elif may_admit:  # no request passes one that does not fit, or it would never fit
                granted = step.admit(request, budget)
                budget -= granted
                may_admit = granted > 0
        if not step.requests:  # a batch that no prompt can use is for decodes
            step.run_decodes()
        self.last.update(dict.fromkeys(step.requests, now))
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        self.last.pop(request, None)

    def plan(
        self, begun: list[Request], waiting: list[Request], now: float, speed: float
    ) -> tuple[list[Request], list[Request]]:
        """Return the prompts that can all be in time, and those that are declined; both by
        deadline.

        `speed` is in prompt tokens a second. Prompts that have begun are not declined.
        """
        cached = self.kv_cache.estimate_cached_tokens
        at, longest, declined = now, list[tuple[float, int, Request]](), set[Request]()
        prompts = sorted(begun + waiting, key=lambda r: r.order_key)
        for i, request in enumerate(prompts):
            done = request.num_computed_tokens or cached(request)
            work = (request.num_tokens - done) / speed
            at += work
            if request.status is RequestStatus.WAITING:
                heappush(longest, (-work, -i, request))
            while at > request.order_key[0] and longest:
                minus_work, _, loser = heappop(longest)
                at += minus_work
                declined.add(loser)
        return [r for r in prompts if r not in declined], [r for r in prompts if r in declined]
