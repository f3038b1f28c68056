"""Admission control: a request that would wait too long is refused at once, with 429.

A client can use a refusal now better than a timeout later: it can try another server. The wait is
estimated from the waiting prompt tokens and the speed at which prompts were served lately.
"""

from typing import Any

from aioserve.errors import EngineOverloadedError
from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    Request,
    SchedulerOutput,
)

SMOOTHING = 0.05  # weight of the newest step in the speed


class BoundedWaitScheduler(BaseScheduler):
    """Order of arrival; the door closes when the line is too long."""

    class Options(PolicyOptions):
        max_wait: PositiveFloat = 5.0  # seconds until the first token, estimated

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.speed = 0.0  # prompt tokens a second; 0 until one was measured
        self.prompt_tokens = 0  # in the last step
        self.planned_at = 0.0

    def add_request(self, request: Request) -> None:
        wait = self.waiting.num_tokens / self.speed if self.speed else 0.0
        if wait > self.options.max_wait:
            raise EngineOverloadedError(
                f"the first token would come in about {wait:.1f} s, later than max_wait "
                f"({self.options.max_wait:g} s)"
            )
        super().add_request(request)

    def schedule(self) -> SchedulerOutput:
        step, now = self.new_step(), self.clock()
        if self.prompt_tokens and now > self.planned_at:  # between two steps: how long one took
            speed = self.prompt_tokens / (now - self.planned_at)
            self.speed += SMOOTHING * (speed - self.speed) if self.speed else speed
        self.planned_at = now
        self.prompt_tokens = 0
        for request in step.run_decodes():
            self.prompt_tokens += step.run(request)
        for request in self.waiting:
            granted = step.admit(request)
            self.prompt_tokens += granted
            if not granted:
                break
        return step.output()
