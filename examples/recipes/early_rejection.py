"""Early rejection: a request that will miss its time to first token is refused while it waits.

`step.reject` ends a waiting request with 429 and `Retry-After`, before any work is spent on it.
`step_time` measures the cost of each prompt token. The limit for the first token is the request's
hint `slo_ttft`, or `patience`. Each step examines `window` requests of the queue and the next step
continues after them, so a long queue costs a step no more than a short one.
"""

from itertools import islice

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    Step,
    hinted_number,
)


class EarlyRejectionScheduler(BaseScheduler):
    """Order of arrival; who would come too late anyway makes room for the others."""

    uses_step_time = True
    place: tuple[float, str] | None = None  # of the next request to look at; None: the first
    ahead = 0  # prompt tokens that wait before it

    class Options(PolicyOptions):
        patience: PositiveFloat = 5.0  # seconds until the first token, without the hint `slo_ttft`
        window: PositiveInt = 128  # waiting requests that a step looks at

    def order(self, request: Request) -> tuple[float, str]:
        return request.arrival_time, request.request_id  # a place that no other request has

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
            self.ahead = max(self.ahead - request.num_tokens, 0)
        if self.step_time.is_fitted:
            self.turn_away(step)
        return step.output()

    def turn_away(self, step: Step) -> None:
        """Reject what would miss its time behind the prompts that stay before it."""
        if self.place is None:
            self.ahead = 0
        rest = iter(self.waiting) if self.place is None else self.waiting.from_key(self.place)
        price, now = self.step_time.seconds_per_prompt_token, self.clock()
        for request in islice(rest, self.options.window):
            wait = now - request.arrival_time + price * (self.ahead + request.num_tokens)
            late = wait - hinted_number(request, "slo_ttft", self.options.patience)
            if late <= 0 or not step.reject(
                request, f"the first token would come {late:.1f} s too late", min(late, 3600.0)
            ):
                self.ahead += request.num_tokens
        following = next(rest, None)
        self.place = None if following is None else self.order(following)
