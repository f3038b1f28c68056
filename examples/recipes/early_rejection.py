"""Early rejection: a request that will miss its time to first token is turned away while it waits.

`step.reject` ends a waiting request with 429 and `Retry-After`, before any work is spent on it.
What each prompt token costs is measured by `step_time`; how long a request may wait for its first
token is its hint `slo_ttft`, or `patience`. The whole line is looked at in every step.
"""

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    Request,
    SchedulerOutput,
    Step,
)


class EarlyRejectionScheduler(BaseScheduler):
    """Order of arrival; who would come too late anyway makes room for the others."""

    uses_step_time = True

    class Options(PolicyOptions):
        patience: PositiveFloat = 5.0  # seconds until the first token, without the hint `slo_ttft`

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        if self.step_time.is_fitted:
            self.turn_away(step)
        return step.output()

    def turn_away(self, step: Step) -> None:
        """Reject what would miss its time behind the prompts that stay before it."""
        price, now, ahead = self.step_time.seconds_per_prompt_token, self.clock(), 0
        for request in self.waiting:
            wait = now - request.arrival_time + price * (ahead + request.num_tokens)
            late = wait - self.limit(request)
            if late <= 0 or not step.reject(
                request, f"the first token would come {late:.1f} s too late", retry_after=late
            ):
                ahead += request.num_tokens

    def limit(self, request: Request) -> float:
        """How long the request may wait for its first token, in seconds."""
        stated = request.hints.get("slo_ttft")
        return float(self.options.patience if isinstance(stated, str | None) else stated)
