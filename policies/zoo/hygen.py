"""Offline work in the slack of online requests, grouped by prefixes (HyGen, NeurIPS'25).

Paper: Sun et al., "HyGen: Efficient LLM Serving via Elastic Online-Offline Request Co-location",
NeurIPS'25, arXiv 2501.14808.

Aim: the most offline throughput that the latency of online requests allows.

Says: online requests go first. A latency predictor says what each further token adds to the step,
and offline requests take what a latency budget leaves, decodes before prompts. They are taken in
the order of a walk through the tree of their prompts, so that shared prefixes are computed once.
They give way as soon as online requests need their places or memory.

Simplified: the walk is the order of the prompts' first `prefix` tokens. The budget is an option;
the paper finds it by profiling. Offline requests do not age: they are served last.

Cost: O(r) for r running requests; O(log n) for each request that enters a queue of n.

Needs: the flag `offline` on requests that may wait.
"""

from collections.abc import Iterator
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    Step,
    hinted_flag,
)


class HyGenScheduler(BaseScheduler):
    """Online requests within the latency budget, then offline ones in what it leaves."""

    uses_step_time = True

    class Options(PolicyOptions):
        latency: PositiveFloat = 0.05  # seconds that a step with online decodes may take
        min_prefill_tokens: PositiveInt = 64  # tokens of online prompts per step at least
        prefix: PositiveInt = 256  # tokens of offline prompts that tell their place in the walk

    options: Options

    def order(self, request: Request) -> tuple[bool, tuple[int, ...], float]:
        is_offline = hinted_flag(request, "offline")
        prefix = tuple(request.token_ids[: self.options.prefix]) if is_offline else ()
        return is_offline, prefix, request.arrival_time

    def victim(self) -> Request | None:
        def late(request: Request) -> tuple[bool, Any]:
            return hinted_flag(request, "offline"), request.order_key

        return max(self.running, key=late, default=None)

    def schedule(self) -> SchedulerOutput:
        step, model = self.new_step(), self.step_time
        online: list[Request] = []
        offline: list[Request] = []
        for request in self.running:
            (offline if hinted_flag(request, "offline") else online).append(request)
        decodes = [r for r in online if not r.is_prefill]
        for request in decodes:
            step.run(request)
        num_context = sum(r.num_computed_tokens for r in decodes)
        left = float("inf")  # prompt tokens' worth of time
        if decodes:
            latency = self.options.latency
            left = model.max_prefill_tokens(latency, len(decodes), num_context)
        own = max(left, self.options.min_prefill_tokens)
        for request in online:
            own -= step.run(request, self.most(own)) if request.is_prefill else 0
        left = min(left, own)
        for request in self.waiting:
            is_offline = hinted_flag(request, "offline")
            if is_offline and offline:  # those that run go on first
                left -= self.run_offline(step, offline, left)
                offline = []
            room = self.most(left if is_offline else own)
            places = () if is_offline else self.places()
            granted = step.admit(request, room, displacing=places) if room > 0 else 0
            if not granted:
                break
            own, left = own - granted, left - granted
        self.run_offline(step, offline, left)
        return step.output()

    def most(self, tokens: float) -> int:
        return int(min(tokens, self.max_num_batched_tokens))

    def places(self) -> Iterator[Request]:
        """Return the offline requests that run, the latest first."""
        return (r for r in reversed(self.running) if hinted_flag(r, "offline"))

    def run_offline(self, step: Step, offline: list[Request], left: float) -> float:
        """Run decodes, then prompts, while the budget lasts; returns the tokens they took."""
        price = self.decode_price()
        taken = 0.0
        for request in sorted(offline, key=lambda r: (r.is_prefill, r.order_key)):
            if taken >= left:
                break
            if request.is_prefill:
                taken += step.run(request, max(self.most(left - taken), 1))
            else:
                taken += step.run(request) * price
        return taken

    def decode_price(self) -> float:
        """Return what a decode costs, in prompt tokens."""
        decode = self.step_time.seconds(0, 1, 0) - self.step_time.seconds(0, 0, 0)
        return max(decode / self.step_time.seconds_per_prompt_token, 1.0)
