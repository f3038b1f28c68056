"""Requests that ran longest make room for those that waited longest (SuperInfer, MLSys'26).

Paper: Yu et al., "SuperInfer: SLO-Aware Rotary Scheduling and Memory Management for LLM Inference
on Superchips", MLSys'26, arXiv 2601.20309, and the authors' code for vLLM.

Aim: first tokens in time while the KV cache is full, where host memory is near.

Says: when running requests hold all memory, waiting ones miss their limits, although the running
ones have slack. So requests rotate before memory runs out: while not all requests fit, the decodes
that have run longest give up their KV blocks to host memory, at most a budget of blocks in a step,
and the requests that have waited longest take their places, new ones and rotated ones alike. On a
GH200 the share of requests whose first token is in time is up to 74.7% higher, at the same
throughput.

Simplified: the order is that of the authors' code, by the times since which requests wait and run.
`slice`, for which a request runs before it rotates, is ours. Left out: copies in both directions at
once, since copies are those of the KV connector. Of the paper, only the abstract was read.

Cost: O(r log r) for r running requests, in steps in which requests wait and do not fit.

Needs: nothing; without host memory (`--kv-connector`) seats rotate while memory is free, and memory
does not.
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


class SuperInferScheduler(BaseScheduler):
    """Decodes, then prompts, longest waiting first; decodes rotate out while not all fit."""

    admits_in_order = "all"

    class Options(PolicyOptions):
        budget: PositiveInt = 4096  # tokens that rotating makes free in a step at most
        slice: PositiveFloat = 1.0  # seconds that a request runs before it rotates out
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)
        window: PositiveInt = 16  # waiting requests for which others make room in a step

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.since: dict[Request, tuple[float, int]] = {}  # time and output at its admission

    def order(self, request: Request) -> float:
        """Return the time since which the request waits."""
        self.since.pop(request, None)
        return self.clock()

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        if self.waiting:
            self.rotate(step)
        for request in step.run_decodes():
            step.run(request)
        now = self.clock()
        for request in self.waiting:
            if not step.admit(request):
                break
            self.since[request] = now, request.num_output_tokens
        return step.output()

    def rotate(self, step: Step) -> None:
        """Let decodes step aside, longest running first, while what waits lacks seats or memory."""
        line = list(islice(self.waiting, self.options.window))
        wanted = sum(request.num_tokens for request in line)
        lacking = min(max(wanted - self.memory.free, 0), self.options.budget)  # tokens
        seats = len(self.running) + len(line) - self.max_num_seqs  # that those in line lack
        if not lacking and seats <= 0:
            return
        ran_enough = self.clock() - self.options.slice
        for request in sorted(self.running, key=self.ran_since):
            since, output = self.ran_since(request)
            if since > ran_enough or (lacking <= 0 and seats <= 0):
                return
            if request.is_prefill or request.num_output_tokens <= output:
                continue  # else it might lose what it has computed again and again
            if lacking > 0:  # without host memory for it, to compute it again would cost too much
                if gone := step.offload(request):
                    lacking, seats = lacking - gone, seats - 1
            elif step.pause(request):
                seats -= 1

    def ran_since(self, request: Request) -> tuple[float, int]:
        return self.since.get(request, (request.arrival_time, 0))

    def on_finish(self, request: Request, reason: str) -> None:
        self.since.pop(request, None)
