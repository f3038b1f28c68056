"""Reading speed: a request that is far ahead of its reader is paused for requests that wait.

A client reads a number of tokens per second (hint `reading_speed`), and tokens that arrive sooner
have no use yet. So a request that is more than `buffer` seconds ahead of its reader is paused when
another one waits for a seat: `pause` gives up the seat and keeps the KV blocks, and `admit` resumes
the request. The request whose reader runs out of text first goes first; a new one counts from its
arrival. This is a simple form of Andes (Liu et al., 2024) and of TokenFlow (Chen et al., 2025).
"""

from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    Request,
    SchedulerOutput,
    WaitReason,
    hinted_number,
)


class ReadingSpeedScheduler(BaseScheduler):
    """The reader that runs out first, first; those who are far ahead give up their seats."""

    class Options(PolicyOptions):
        reading_speed: PositiveFloat = 8.0  # tokens a second, of a request that states none
        buffer: PositiveFloat = 2.0  # seconds of text by which a request must be ahead to be paused

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.began: dict[Request, float] = {}  # when the first token was there

    def order(self, request: Request) -> float:
        """When its reader has read all that is there."""
        speed = hinted_number(request, "reading_speed", self.options.reading_speed)
        if speed <= 0:
            speed = self.options.reading_speed
        began = self.began.get(request, request.arrival_time)
        return began + request.num_output_tokens / speed

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        now = self.clock()
        for request in self.running:
            if request.num_output_tokens:
                self.began.setdefault(request, now)
        for request in step.run_decodes():
            step.run(request)
        ahead = sorted(self.running, key=self.order) if self.waiting else []
        for request in self.waiting:
            while not step.admit(request):
                if request.wait_reason is not WaitReason.SEATS or not ahead:
                    return step.output()
                if self.order(ahead[-1]) <= now + self.options.buffer:
                    return step.output()
                step.pause(ahead.pop())
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        self.began.pop(request, None)
