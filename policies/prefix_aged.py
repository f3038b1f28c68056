"""Longest cached prefix first (SGLang's LPM), aged so that no request starves.

The waiting request with the most cached tokens goes next, because it costs least and its prefix
is still there; every second of waiting counts like `ageing` cached tokens more, so that a prefix
of that many tokens is worth one second. Without ageing, warm sessions keep cold requests out for
as long as they keep coming (sglang#31954); with much of it, this is first come, first served.
Ranking costs about 2 microseconds per compared request, only in steps with a free seat.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    OrderPart,
    PolicyOptions,
    PositiveInt,
    Request,
    SchedulerOutput,
    Step,
)


class PrefixAgedOrder(OrderPart):
    """Running prompts, then the request with the longest cached prefix plus age."""

    admits_in_order = None

    class Options(PolicyOptions):
        ageing: NonNegativeFloat = 500.0  # cached tokens that a second of waiting is worth
        window: PositiveInt = 512  # waiting requests compared per step, oldest first

    def line(self, step: Step, prompts: list[Request], num_tokens: int | None) -> Iterator[Request]:
        yield from prompts
        policy = self.policy
        has_room = step.token_budget > 0 and len(policy.running) < policy.max_num_seqs
        window = self.options.window if has_room else 1  # the first still hears why it waits
        yield from sorted(islice(policy.waiting, window), key=self.score, reverse=True)

    def score(self, request: Request) -> float:
        """Return the score in tokens: those that are cached, and those that waiting is worth."""
        waited = self.policy.clock() - request.arrival_time
        num_cached = self.policy.kv_cache.estimate_cached_tokens(request)
        return num_cached + float(self.options.ageing) * waited


class PrefixAgedScheduler(BaseScheduler):
    """Decodes, running prompts, then the request with the longest cached prefix plus age."""

    keeps_decoding = True

    class Options(PrefixAgedOrder.Options):
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefixes = PrefixAgedOrder(self, self.options)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        prompts = step.run_decodes()
        running = set(prompts)
        for request in self.prefixes.line(step, prompts, None):
            if request in running:
                step.run(request)
            elif not step.admit(request):
                break  # no request passes one that does not fit, or it would never fit
        return step.output()
