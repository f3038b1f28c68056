"""KV blocks of agents stay through short calls of tools, for a priced time (Continuum, 2025).

Paper: Li et al., "Continuum: Efficient and Robust Multi-Turn LLM Agent Scheduling with KV Cache
Time-to-Live", 2025, arXiv 2511.02230.

Aim: programs with tools end early, their prefixes are not computed again.

Says: a turn that ends with a call of a tool comes back soon, with all that was said before. Its KV
blocks are pinned for a time to live that weighs what it saves, computing the prefix again and
waiting in line again, against what the memory would do for others, from how long each tool took
before. Programs are served in the order in which they began.

Simplified: the price of memory is its share of the cache times the time held, while requests wait;
time costs nothing while none waits. Times to live are chosen among the durations that were seen.

Cost: O(log n) for each request that enters a queue of n; O(h) at the end of a turn for h durations.

Needs: conversations (hint `session`); better with `program` and the `tool` that the reply calls.
"""

from bisect import insort
from collections import deque
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    hinted_text,
)

MAX_NAMES = 4096  # programs, and conversations between turns, that are remembered, the latest
MAX_TOOLS = 256
MAX_DURATIONS = 64  # of each tool


class ContinuumScheduler(BaseScheduler):
    """Programs in the order in which they began; prefixes pinned between their turns."""

    uses_step_time = True
    admits_in_order = "all"

    class Options(PolicyOptions):
        first_ttl: PositiveFloat = 2.0  # seconds to live while nothing is known of a tool
        max_ttl: PositiveFloat = 60.0  # seconds
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.began: dict[tuple[str, str], float] = {}  # by program, in seconds
        self.paused: dict[Any, tuple[str, float]] = {}  # by conversation: its tool, since when
        self.recent: dict[str, deque[float]] = {}  # seconds that calls of a tool took, as they came
        self.sorted: dict[str, list[float]] = {}  # the same in order
        self.wait = 0.0  # seconds between arrival and service: a moving average

    def order(self, request: Request) -> tuple[float, float]:
        name = hinted_text(request, "program") or hinted_text(request, "session")
        if not name:
            return request.arrival_time, request.arrival_time
        began = self.began.setdefault((request.user, name), request.arrival_time)
        keep_latest(self.began, MAX_NAMES)
        if (pause := self.paused.pop(request.conversation, None)) is not None:
            self.learn(pause[0], request.arrival_time - pause[1])
        return began, request.arrival_time

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in sorted(step.run_decodes(), key=lambda r: r.order_key):
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
            self.unpin(request)  # which holds its prefix itself now
            self.wait += 0.05 * (self.clock() - request.arrival_time - self.wait)
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        if reason not in ("stop", "length") or "session" not in request.hints:
            return
        tool, now = hinted_text(request, "tool"), self.clock()
        if (ttl := self.time_to_live(request, tool)) > 0:
            self.pin(request, now + ttl)
        self.paused[request.conversation] = (tool, now)
        keep_latest(self.paused, MAX_NAMES)

    def learn(self, tool: str, seconds: float) -> None:
        recent = self.recent.setdefault(tool, deque())
        durations = self.sorted.setdefault(tool, [])
        if len(recent) >= MAX_DURATIONS:
            durations.remove(recent.popleft())
        recent.append(seconds)
        insort(durations, seconds)
        keep_latest(self.recent, MAX_TOOLS)
        keep_latest(self.sorted, MAX_TOOLS)

    def time_to_live(self, request: Request, tool: str) -> float:
        """Return the seconds that save the most in expectation; 0 if none is worth its memory."""
        durations = self.sorted.get(tool)
        if not durations:
            return self.options.first_ttl
        saved = request.num_tokens * self.step_time.seconds_per_prompt_token + self.wait
        price = request.num_tokens / self.memory.total if self.waiting else 0.0
        best, ttl, spent, count = 0.0, 0.0, 0.0, len(durations)
        for i, seconds in enumerate(durations, start=1):
            spent += seconds  # by those that come back in time; the others hold it to the end
            gain = i * saved - price * (spent + (count - i) * seconds)
            if gain > best and seconds <= self.options.max_ttl:
                best, ttl = gain, seconds
        return 1.1 * ttl  # a tool that takes as long as before is in time


def keep_latest(entries: dict[Any, Any], most: int) -> None:
    """Drop the oldest entry if there are more than `most`."""
    if len(entries) > most:
        del entries[next(iter(entries))]
