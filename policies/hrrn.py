"""Highest response ratio next (Brinch Hansen 1971; merged in SGLang in 2026), on uncached work.

The prompt with the highest (wait + work) / work goes next, where work is the time that its
uncached tokens will take: short prompts overtake long ones, and a request that has waited long
enough goes first, so none starves. Decodes come before prompts; a prompt goes on chunk by chunk in
competition with those that wait. First tokens come much earlier on average; the longest prompts
pay for it. Ranking costs about 2 microseconds per compared request, only in steps with a free seat.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    OrderPart,
    PolicyOptions,
    PositiveInt,
    Request,
    RequestStatus,
    SchedulerOutput,
    Step,
)


class HRRNOrder(OrderPart):
    """The prompt with the highest ratio of waiting time to uncached work, running or not."""

    admits_in_order = None
    uses_step_time = True

    class Options(PolicyOptions):
        window: PositiveInt = 512  # waiting requests compared per step, oldest first

    def line(self, step: Step, prompts: list[Request], num_tokens: int | None) -> Iterator[Request]:
        policy = self.policy
        has_room = step.token_budget > 0 and len(policy.running) < policy.max_num_seqs
        window = self.options.window if has_room else 1  # the first still hears why it waits
        compared = prompts + list(islice(policy.waiting, window))
        return iter(sorted(compared, key=self.response_ratio, reverse=True))

    def response_ratio(self, request: Request) -> float:
        """1 on arrival, and it grows the faster the less work there is."""
        policy = self.policy
        done = request.num_computed_tokens or policy.kv_cache.estimate_cached_tokens(request)
        num_tokens = request.num_tokens - done
        model = policy.step_time
        work = model.seconds_per_step + num_tokens * model.seconds_per_prompt_token
        return 1.0 + (policy.clock() - request.arrival_time) / work


class HRRNScheduler(BaseScheduler):
    """Decodes, then the request with the highest ratio of waiting time to uncached work."""

    uses_step_time = True

    class Options(HRRNOrder.Options):
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ratio = HRRNOrder(self, self.options)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        may_admit = True
        for request in self.ratio.line(step, step.run_decodes(), None):
            if request.status is RequestStatus.RUNNING:
                step.run(request)
            elif may_admit:  # no request passes one that does not fit, or it would never fit
                may_admit = step.admit(request) > 0
        return step.output()
