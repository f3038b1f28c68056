"""Classes of service on one engine by deadlines and slack (QoServe, once Niyama, ASPLOS'26).

Paper: Goel et al., "Niyama: Breaking the Silos of LLM Inference Serving", 2025, arXiv 2503.22562;
QoServe, ASPLOS'26.

Aim: the most requests within the service levels of their classes.

Says: interactive requests are due by their first token and each after it, others by their end.
Prompts go by a mix of deadline and work that remains, which is the deadline alone at low load. A
step takes as many prompt tokens as the stream with the least slack allows. Under overload requests
are relegated, unimportant ones first, so that the others are in time.

Simplified: step times are fitted online, where the paper trains a model of them. Relegation looks
at the prompts in line once, and does not preempt.

Cost: O(w log w) of w waiting requests that are compared, at most `window`.

Needs: classes as `slo_ttft` and `slo_tpot`, or the flag `offline` for work that is due by its end;
the request's priority: those above 0 are unimportant.
"""

from itertools import islice

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    RequestStatus,
    SchedulerOutput,
    hinted_flag,
    hinted_number,
)


class QoServeScheduler(BaseScheduler):
    """Decodes, then prompts by deadline and work; those that cannot be in time go last."""

    uses_step_time = True

    class Options(PolicyOptions):
        ttft: PositiveFloat = 1.0  # seconds to the first token of a request that states none
        tpot: PositiveFloat = 0.05  # seconds for each token after it
        ttlt: PositiveFloat = 600.0  # seconds to the last token of a request that is offline
        alpha: NonNegativeFloat = 1.0  # seconds that a second less of work is worth; 0: EDF
        min_prefill_tokens: PositiveInt = 64  # tokens of prompts per step at least
        window: PositiveInt = 256  # waiting requests compared per step, earliest deadline first

    options: Options

    def order(self, request: Request) -> float:
        """Return when the first token is due, or the reply of a request that is offline."""
        offline, options = hinted_flag(request, "offline"), self.options
        limit = options.ttlt if offline else hinted_number(request, "slo_ttft", options.ttft)
        return request.arrival_time + limit

    def schedule(self) -> SchedulerOutput:
        step, now, model = self.new_step(), self.clock(), self.step_time
        prefills = step.run_decodes()
        decodes = step.requests
        num_context = sum(r.num_computed_tokens for r in decodes)
        slack = min(map(self.slack, decodes), default=self.options.ttft / 8)
        budget = model.max_prefill_tokens(slack, len(decodes), num_context)
        budget = min(max(budget, self.options.min_prefill_tokens), self.max_num_batched_tokens)
        speed = budget / model.seconds(budget, len(decodes), num_context + budget)
        has_room = step.token_budget > 0 and len(self.running) < self.max_num_seqs
        waiting = islice(self.waiting, self.options.window if has_room else 1)
        may_admit = True
        for request in self.rank([*prefills, *waiting], now, speed):
            if request.status is RequestStatus.RUNNING:
                budget -= step.run(request, budget)
            elif may_admit:  # no request passes one that does not fit, or it would never fit
                granted = step.admit(request, budget)
                budget -= granted
                may_admit = granted > 0
        return step.output()

    def slack(self, request: Request) -> float:
        """Return seconds that the next step may take for this stream; never less than its pace."""
        tpot = hinted_number(request, "slo_tpot", self.options.tpot)
        if hinted_flag(request, "offline"):
            return self.options.ttft / 8  # newcomers wait for the end of a step
        first: float = request.order_key[0]
        return max(tpot, first + tpot * request.num_output_tokens - self.clock())

    def rank(self, prompts: list[Request], now: float, speed: float) -> list[Request]:
        """Return the prompts that can be in time, those that ran before first; then the relegated.

        An important request is relegated when it would be late alone, an unimportant one when it
        would be late behind those that go before it.
        """
        cached = self.kv_cache.estimate_cached_tokens
        ranked = []
        for request in prompts:
            done = request.num_computed_tokens or cached(request)
            work = max(request.num_tokens - done, 1) / speed
            key = request.order_key
            ranked.append((key[0] + self.options.alpha * work, key, work, request))
        in_time, late, at = [], [], now
        for _, (due, *_), work, request in sorted(ranked):
            start = at if request.priority > 0 else now
            if start + work > due and not request.num_output_tokens:
                late.append(request)
            else:
                in_time.append(request)
                at += work
        return in_time + late
