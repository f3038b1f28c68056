"""Reuse probability: prefixes that are likely to be used again stay longer in the KV cache.

A chat goes on after a while, a single call does not. For each kind of request (hint `type`, else
the user) the policy counts how often a conversation (hint `session`) goes on, and after how long. A
prefix is worth its memory until the probability of a next turn is below `least`: that time is its
rank. Times until a return are assumed to be exponential, as in KVCache in the Wild (ATC'25), which
computes ranks from the probability at each eviction.
"""

import math
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
)


class Kind:
    """What was seen of one kind of requests."""

    ends = returns = 0
    pauses = 0.0  # seconds from an end to the next turn, all returns together

    def horizon(self, least: float) -> float:
        """Seconds after which a next turn is less likely than `least`."""
        if not self.returns:
            return 0.0
        odds = (self.returns + 1) / (self.ends - self.returns + 1)
        return max(self.pauses / self.returns * math.log(odds * (1 - least) / least), 0.0)


class ReuseProbabilityScheduler(BaseScheduler):
    """Order of arrival; what is least likely to be asked for again is evicted first."""

    class Options(PolicyOptions):
        least: PositiveFloat = 0.1  # probability of a next turn, below which a prefix has no worth
        max_kinds: PositiveInt = 1000  # of requests that are told apart, the latest
        max_sessions: PositiveInt = 10_000  # conversations that are waited for, the latest

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kinds: dict[object, Kind] = {}
        self.left: dict[object, tuple[Kind, float]] = {}  # by conversation: its last turn's end

    def kind(self, request: Request) -> Kind:
        name = request.hints.get("type", request.user)
        if name not in self.kinds and len(self.kinds) >= self.options.max_kinds:
            del self.kinds[next(iter(self.kinds))]
        return self.kinds.setdefault(name, Kind())

    def retention(self, request: Request) -> float:
        return self.clock() + self.kind(request).horizon(self.options.least)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
            if request.conversation in self.left:
                kind, since = self.left.pop(request.conversation)
                kind.returns += 1
                kind.pauses += self.clock() - since
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        kind = self.kind(request)
        kind.ends += 1
        if "session" in request.hints:
            self.left[request.conversation] = kind, self.clock()
        if len(self.left) > self.options.max_sessions:
            del self.left[next(iter(self.left))]
