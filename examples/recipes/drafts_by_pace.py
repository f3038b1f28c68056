"""Draft lengths: a request behind its pace gets long drafts, one that keeps it gets none.

Speculative decoding uses computation to be faster, and a full batch has none to spare. While at
most `free` requests run, the runner chooses the draft lengths. When more run, only a request whose
tokens come slower than its reader needs them gets drafts: its pace is the hint `slo_tpot`, or
`pace`, in seconds per token. This is a simple form of SLOs-Serve (Chen et al., 2025), which plans
draft lengths and steps together.
"""

from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    hinted_number,
)


class DraftsByPaceScheduler(BaseScheduler):
    """Decodes, then prompts in order of arrival; drafts for those that are late."""

    class Options(PolicyOptions):
        pace: PositiveFloat = 0.05  # seconds per token, without the hint `slo_tpot`
        free: PositiveInt = 4  # running requests up to which the runner drafts what pays

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.began: dict[str, float] = {}  # by request id, when its first token was there

    def draft_length(self, request: Request) -> int | None:
        if len(self.running) <= self.options.free:
            return None  # as many as pay
        return self.max_draft_tokens if self.is_late(request) else 0

    def is_late(self, request: Request) -> bool:
        """Whether its tokens have come slower than its pace since the first one."""
        if not request.num_output_tokens:
            return False
        began = self.began.setdefault(request.request_id, self.clock())
        pace = hinted_number(request, "slo_tpot", self.options.pace)
        return self.clock() > began + pace * (request.num_output_tokens - 1)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():  # returns those that are half-way in their prompts
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        self.began.pop(request.request_id, None)
