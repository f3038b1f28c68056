"""Skip-join multi-level feedback queue (FastServe, NSDI'26): the least served first, unpredicted.

A request's level follows from its service so far: its prompt counts at once, so a long one skips
the upper levels, and each output token counts like `output_weight` prompt tokens, so a request
sinks while it runs. Each level is twice as large as the one above. Upper levels go first, and take
seats and blocks from lower ones. Waiting lifts a request, from the lowest level to the top in
`starve_after` seconds. Short replies end much sooner, without predicted lengths; long ones end
later. The paper swaps displaced requests to host memory, as the recipe swapped_levels.py does. Here
their tokens are computed again, so a request is displaced only if its expected remaining output (as
much as it had) is more work than computing it again while all running requests wait, and more than
the remaining output of the request that takes its place. A request is displaced at most
`max_preemptions` times. The policy costs half a microsecond per running request in steps where a
request waits for a seat or blocks.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    RecomputePrice,
    Request,
    RequestStatus,
    SchedulerOutput,
)


class MLFQScheduler(BaseScheduler):
    """Decodes, then prompts by level and age; a waiting upper level displaces a lower one."""

    keeps_decoding = True

    class Options(PolicyOptions):
        quantum: PositiveInt = 512  # service in the top level, in prompt tokens; doubles per level
        num_levels: PositiveInt = 6
        output_weight: PositiveFloat = 8.0  # an output token holds a seat for a whole step
        starve_after: PositiveFloat = 10.0  # seconds that lift the lowest level to the top
        max_preemptions: PositiveInt = 3  # of one request, to make room for upper levels
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)
        window: PositiveInt = 128  # waiting requests examined per step

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running_before: list[Request] = []
        self.victims: list[tuple[tuple[int, Any], float, Request]] | None = None

    def level(self, request: Request) -> int:
        options = self.options
        served = request.num_prompt_tokens + options.output_weight * request.num_output_tokens
        return min(int(served / options.quantum).bit_length(), options.num_levels - 1)

    def order(self, request: Request) -> float:
        """Return when it will have been lifted to the top; set whenever it enters the queue."""
        share = self.level(request) / max(self.options.num_levels - 1, 1)
        return self.clock() + share * self.options.starve_after

    def victim(self) -> Request | None:
        return max(self.running, key=self.lowness, default=None)

    def lowness(self, request: Request) -> tuple[int, Any]:
        return (self.level(request), request.order_key)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        prefills = step.run_decodes()
        waiting = list(islice(self.waiting, self.options.window))
        # Not those that come in by this step: they would be thrown out of every step again.
        self.running_before, self.victims = self.running.copy(), None
        entering = set(waiting)
        blocked_level = self.options.num_levels
        for request in sorted(prefills + waiting, key=lambda r: r.order_key):
            if request not in entering:
                step.run(request)
            elif self.level(request) < blocked_level:
                if not step.admit(request, displacing=self.displaceable(request)):
                    # Only upper levels may pass one that does not fit; none, if it was lifted.
                    is_lifted = request.order_key[0] <= self.clock()
                    blocked_level = 0 if is_lifted else self.level(request)
        return step.output()

    def displaceable(self, request: Request) -> Iterator[Request]:
        """Yield requests of lower levels whose displacing pays, the lowest first; ranked once a
        step.
        """
        level, expected = self.level(request), self.expected_work(request)
        if self.victims is None:
            self.victims = self.rank()
        while self.victims and self.victims[-1][-1].status is not RequestStatus.RUNNING:
            self.victims.pop()
        for (victim_level, _), gain, victim in reversed(self.victims):
            if victim_level <= level:
                return
            if gain >= expected:
                yield victim

    def rank(self) -> list[tuple[tuple[int, Any], float, Request]]:
        """Return the requests that may be displaced, the lowest last, each with the work that is
        put off, less that which comes on top: while its tokens are computed again, every running
        request waits.
        """
        running = self.running_before
        price = RecomputePrice(self.kv_cache, running, self.waiting.num_tokens)
        return sorted(
            (lowness, self.expected_work(r) - len(running) * price.num_tokens(r), r)
            for r in running
            if r.num_preemptions < self.options.max_preemptions
            and (lowness := self.lowness(r))[0] > 0
        )

    def expected_work(self, request: Request) -> float:
        """Return the work to come, in prompt tokens, of a reply that goes on as long as it has."""
        return self.options.output_weight * request.num_output_tokens
