"""Keeps or drops KV blocks while a tool runs, whichever wastes less (InferCept, ICML'24).

Paper: Abhyankar et al., "InferCept: Efficient Intercept Support for Augmented Large Language Model
Inference", ICML'24, arXiv 2402.01869.

Aim: the least memory wasted by requests that call tools.

Says: while a tool runs, keeping the request's KV blocks wastes its memory for that time; dropping
them wastes the time in which they are computed again, of its own memory and of all others that wait
for that. How long the tool will take is not known: the longer it has taken, the longer it will. So
blocks are kept until keeping them has cost as much as dropping them would. Requests go in the order
in which their programs came.

Simplified: a program's turns are requests of one conversation. The paper's third way, to swap out
as many blocks as the bus can move beside a step, is left out.

Cost: O(log n) for each request that enters a queue of n; constant at the end of a turn.

Needs: conversations (hint `session`), and the `tool` that the reply calls: without it nothing is
kept; in order by `program`, else by the conversation.
"""

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

MAX_PROGRAMS = 4096  # whose arrival is remembered, the latest


class InferCeptScheduler(BaseScheduler):
    """Programs in order of arrival; prefixes stay until keeping them costs what dropping would."""

    uses_step_time = True
    admits_in_order = "all"

    class Options(PolicyOptions):
        max_seconds: PositiveFloat = 120.0  # for which the blocks of a request stay at most
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.came: dict[tuple[str, str], float] = {}  # by program, in seconds

    def order(self, request: Request) -> tuple[float, float]:
        name = hinted_text(request, "program") or hinted_text(request, "session")
        if not name:
            return request.arrival_time, request.arrival_time
        came = self.came.setdefault((request.user, name), request.arrival_time)
        if len(self.came) > MAX_PROGRAMS:
            del self.came[next(iter(self.came))]
        return came, request.arrival_time

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        for request in sorted(step.run_decodes(), key=lambda r: r.order_key):
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
            self.unpin(request)  # which holds its prefix itself now
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        calls = hinted_text(request, "tool") and hinted_text(request, "session")
        if calls and reason in ("stop", "length"):
            seconds = min(self.break_even(request), self.options.max_seconds)
            self.pin(request, self.clock() + seconds)

    def break_even(self, request: Request) -> float:
        """Return seconds after which keeping the blocks has wasted as much memory as dropping them
        would: that of all running requests, and its own, while its tokens are computed again.
        """
        again = request.num_tokens * self.step_time.seconds_per_prompt_token
        return again * (self.memory.held + request.num_tokens) / request.num_tokens
