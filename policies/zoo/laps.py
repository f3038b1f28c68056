"""Short prompts in batches, apart from long ones (LAPS, once PLA-Serve, MLSys'26).

Paper: She et al., "LAPS: A Length-Aware-Prefill LLM Serving System", MLSys'26, arXiv 2601.11589.

Aim: early first tokens of short prompts and of later turns, beside long prompts.

Says: a long prompt is bound by compute, and a short one, as that of a later turn, by memory, so
that each slows the other down in one batch. Two queues keep them apart: on one engine in time, on
several in space. Short prompts are collected until they are as many as a batch is deep, or the
first of them has waited for a window; both follow the time in which batches fill. The paper reports
prefill latencies that are over 30% lower than in SGLang, and 35% more requests per second at high
concurrency.

Simplified: steps with short and with long prompts alternate where both wait. The depth is fixed,
and the window is the mean time in which a batch fills, up to a limit, which is the time of a batch
that did not fill. Left out: several engines; CUDA graphs for batches of a few shapes, from which a
part of the paper's gain comes. Of the paper, only the abstract and summaries by others were read.

Cost: O(w) of w waiting requests looked at, at most `window`.

Needs: nothing.
"""

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    NonNegativeFloat,
    PolicyOptions,
    PositiveInt,
    Request,
    SchedulerOutput,
    Step,
)

SMOOTHING = 0.2  # share of the newest batch in the mean time to fill one


class LAPSScheduler(BaseScheduler):
    """Decodes, then either short prompts, once they are a batch, or long ones, in turns."""

    keeps_decoding = True

    class Options(PolicyOptions):
        short: PositiveInt = 256  # tokens to compute up to which a prompt is short
        depth: PositiveInt = 8  # short prompts that make a batch
        max_wait: NonNegativeFloat = 0.05  # seconds that a short prompt waits for others at most
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)
        window: PositiveInt = 512  # waiting requests looked at per step, oldest first

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.was_short = False  # whether the last step with prompts had short ones
        self.wait = self.options.max_wait  # seconds that short prompts wait for others
        self.learned = -math.inf  # arrival of the last short prompt whose batch was learned from

    def is_short(self, request: Request) -> bool:
        done = request.num_computed_tokens or self.kv_cache.estimate_cached_tokens(request)
        return request.num_tokens - done <= self.options.short

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        running: tuple[list[Request], list[Request]] = ([], [])  # of long, of short prompts
        for request in step.run_decodes():
            running[self.is_short(request)].append(request)
        waiting: tuple[list[Request], list[Request]] = ([], [])
        has_room = step.token_budget > 0 and len(self.running) < self.max_num_seqs
        for request in islice(self.waiting, self.options.window if has_room else 1):
            waiting[self.is_short(request)].append(request)
        shorts = waiting[True]
        if shorts and not self.is_batch(shorts):
            self.wake_at(shorts[0].arrival_time + self.wait)
            shorts.clear()
        has_long, has_short = (bool(running[kind] or waiting[kind]) for kind in (False, True))
        turn = not self.was_short if has_long and has_short else has_short
        if self.serve(step, running[turn], waiting[turn]):
            self.was_short = turn
            if turn and shorts and shorts[0] not in self.waiting:
                self.learn(shorts)
        else:  # it is its turn again once it fits, so that the other kind never passes it for ever
            self.serve(step, running[not turn], ())
        return step.output()

    def serve(self, step: Step, running: Sequence[Request], waiting: Sequence[Request]) -> bool:
        """Give prompts of one kind what is left of the step; return whether any got tokens."""
        got = sum(step.run(request) for request in running)
        for request in waiting:
            tokens = step.admit(request)
            got += tokens
            if not tokens:
                break
        return got > 0

    def is_batch(self, shorts: Sequence[Request]) -> bool:
        """Return whether short prompts are enough, or have waited for long enough, to run."""
        due = shorts[0].arrival_time + self.wait
        return len(shorts) >= self.options.depth or self.clock() >= due

    def learn(self, shorts: Sequence[Request]) -> None:
        """Follow the time in which a batch, which has begun to run, was filled. What is left of it
        for later steps, or comes back after a preemption, is not a batch of its own.
        """
        depth, first, fill = self.options.depth, shorts[0].arrival_time, self.options.max_wait
        if first > self.learned:
            if len(shorts) >= depth:
                fill = min(shorts[depth - 1].arrival_time - first, fill)
            self.wait += SMOOTHING * (fill - self.wait)
        self.learned = max(shorts[-1].arrival_time, self.learned)
