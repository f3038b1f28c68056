"""Skip-join multi-level feedback queue; paused requests keep their KV blocks (FastServe, NSDI'26).

Paper: Wu et al., "Fast Distributed Inference Serving for Large Language Models", 2023, arXiv
2305.05920; NSDI'26.

Aim: low mean latency without knowing lengths.

Says: a new request joins the level whose quantum holds its prompt, and sinks a level when it has
used its quantum; quanta double. Each iteration runs the requests of the highest levels, so that
others are preempted between any two tokens. KV blocks of preempted requests are swapped out before
memory runs short. A request that has waited too long is promoted to the top.

Simplified: service is counted in tokens. A preempted request is paused: its blocks stay, and are
computed again if memory runs short meanwhile, where the paper swaps them to host memory.

Cost: O(log n) for each request that enters a queue of n; O(r log r) of r running requests in steps
in which a request waits for a seat.

Needs: nothing.
"""

from itertools import islice
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    SchedulerOutput,
    Step,
)


class FastServeScheduler(BaseScheduler):
    """Decodes, then prompts by level; a waiting upper level takes the seat of a lower one."""

    class Options(PolicyOptions):
        quantum: PositiveInt = 512  # service in the top level, in prompt tokens; doubles per level
        num_levels: PositiveInt = 8  # of service
        output_weight: PositiveFloat = 8.0  # an output token holds a seat for a whole step
        starve_after: PositiveFloat = 10.0  # seconds of waiting that promote to the top level
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.promoted: dict[Request, float] = {}  # with the service that they had then

    def served(self, request: Request) -> float:
        """Return the service of the request in prompt tokens; its prompt counts at once."""
        return request.num_prompt_tokens + self.options.output_weight * request.num_output_tokens

    def level(self, request: Request) -> int:
        served = self.served(request) - self.promoted.get(request, 0.0)
        return min(int(served / self.options.quantum).bit_length(), self.options.num_levels - 1)

    def order(self, request: Request) -> tuple[int, float]:
        """Return the level of the request, and the time at which it entered the level."""
        return self.level(request), self.clock()

    def group_by(self, request: Request) -> str:
        return str(self.level(request))

    def lowness(self, request: Request) -> tuple[int, Any]:
        return self.level(request), request.order_key

    def victim(self) -> Request | None:
        return max(self.running, key=self.lowness, default=None)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        if self.waiting:
            self.promote()
            self.take_seats(step)
        for request in sorted(step.run_decodes(), key=self.lowness):
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()

    def promote(self) -> None:
        """Lift the request that has waited longest in each level to the top, if it was too long."""
        too_long = self.clock() - self.options.starve_after
        for request in self.waiting.heads():
            level, entered = request.order_key[0]
            if level and entered < too_long:
                self.promoted[request] = self.served(request)
                self.reorder(request)

    def take_seats(self, step: Step) -> None:
        """Pause running requests in favour of waiting ones of upper levels, before any runs."""
        free = self.max_num_seqs - len(self.running)
        lowest = sorted(self.running, key=self.lowness)
        for request in list(islice(self.waiting, self.max_num_seqs))[max(free, 0) :]:
            while lowest and self.level(lowest[-1]) > self.level(request):
                if step.pause(lowest.pop()):
                    break
            else:
                return

    def on_finish(self, request: Request, reason: str) -> None:
        self.promoted.pop(request, None)
