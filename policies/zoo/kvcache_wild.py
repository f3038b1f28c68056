"""Evicts prefixes that requests of a kind are unlikely to use again (KVCache in the Wild, ATC'25).

Paper: Wang et al., "KVCache Cache in the Wild: Characterizing and Optimizing KVCache Cache at a
Large Cloud Provider", ATC'25, arXiv 2506.02634.

Aim: more prompt tokens are found in a cache of the same size.

Says: whether and when a prefix is used again depends on the kind of request: its type, and which
turn of the conversation it is. For each kind the times to reuse are close to exponential. The
prefix with the smallest probability to be used within the lifespan of a cached block goes first.

Simplified: the rank is the time at which that probability falls below `least`, stated once when the
request ends, where the paper computes probabilities anew when it evicts. The lifespan is that time.

Cost: O(log n) for each block that becomes free, of n cached blocks.

Needs: conversations (hint `session`), and the hint `type` of a request, else its user.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveInt,
    Request,
    SchedulerOutput,
    hinted_text,
)

Probability = Annotated[float, Meta(gt=0, lt=1)]


@dataclass
class Kind:
    """The statistics of requests of one type and turn."""

    ends: int = 0
    returns: int = 0
    seconds: float = 0.0  # from an end to the next turn, all returns together

    def lifespan(self, least: float) -> float:
        """Return seconds after which a next turn is less likely than `least`."""
        if not self.returns:
            return 0.0
        odds = (self.returns + 1) / (self.ends - self.returns + 1)
        return max(self.seconds / self.returns * math.log(odds * (1 - least) / least), 0.0)


class KVCacheWildScheduler(BaseScheduler):
    """Order of arrival; the prefix that is least likely to be used again is evicted first."""

    class Options(PolicyOptions):
        least: Probability = 0.1  # probability of reuse below which a prefix has no worth
        turns: PositiveInt = 4  # of a conversation that are told apart
        max_sessions: PositiveInt = 10000  # conversations between turns, the latest
        max_kinds: PositiveInt = 1000  # kinds of requests, the latest
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kinds: dict[tuple[str, int], Kind] = {}
        # By conversation: the kind of its last turn, which turn that was, and when it ended.
        self.left: dict[Any, tuple[Kind, int, float]] = {}
        self.turn: dict[Request, int] = {}  # of requests that wait or run, from the second on

    def kind(self, request: Request) -> Kind:
        name = hinted_text(request, "type") or request.user
        key = (name, min(self.turn.get(request, 1), self.options.turns))
        if key not in self.kinds and len(self.kinds) >= self.options.max_kinds:
            del self.kinds[next(iter(self.kinds))]
        return self.kinds.setdefault(key, Kind())

    def order(self, request: Request) -> float:
        if (left := self.left.pop(request.conversation, None)) is not None:
            kind, turn, ended = left
            kind.returns += 1
            kind.seconds += max(request.arrival_time - ended, 0.0)
            self.turn[request] = turn + 1
        return request.arrival_time

    def retention(self, request: Request) -> float:
        return self.clock() + self.kind(request).lifespan(self.options.least)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        kind, turn = self.kind(request), self.turn.pop(request, 1)
        kind.ends += 1
        if hinted_text(request, "session"):
            self.left[request.conversation] = kind, turn, self.clock()
            if len(self.left) > self.options.max_sessions:
                del self.left[next(iter(self.left))]
