"""Pauses of tools: a conversation's KV blocks stay for a while, so that its next turn finds them.

An agent's turn ends with a tool call, and its next turn arrives a moment later with the whole
conversation. `pin` keeps that prefix for `ttl` seconds, and `unpin` releases it once the next turn
runs. Turns of conversations with pinned prefixes go first, because they release them. This is a
simple form of Continuum (Li et al., 2025), which computes the time to live from the durations of
tools.
"""

from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    Request,
    SchedulerOutput,
)


class ToolPausesScheduler(BaseScheduler):
    """Turns of pinned conversations first, then order of arrival."""

    class Options(PolicyOptions):
        ttl: PositiveFloat = 5.0  # seconds for which the prefix of a conversation stays

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pinned_until: dict[object, float] = {}  # by conversation

    def order(self, request: Request) -> tuple[bool, float]:
        until = self.pinned_until.get(request.conversation, 0.0)
        return until <= self.clock(), request.arrival_time

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        self.forget_ended()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
            if self.pinned_until.pop(request.conversation, None) is not None:
                self.unpin(request)  # which holds the prefix itself now
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        if reason in ("stop", "length") and "session" in request.hints:
            until = self.clock() + self.options.ttl
            if self.pin(request, until):
                self.pinned_until.pop(request.conversation, None)  # to the end of the line
                self.pinned_until[request.conversation] = until

    def forget_ended(self) -> None:
        """Drop conversations that have not come back in time, the first to end first."""
        now = self.clock()
        while self.pinned_until and next(iter(self.pinned_until.values())) <= now:
            del self.pinned_until[next(iter(self.pinned_until))]
