"""Small prompts wait for one another while streams run (vLLM pull request, 2026).

Paper: "Batch small prefill chunks under decode load", 2026, vLLM pull request 54145.

Aim: more requests per second within a mean end-to-end latency, where prompts are mixed.

Says: a small piece of a prompt beside decodes leaves the card underused. While requests decode,
pieces of prompts below a threshold are held back, at most for a bounded time, and released
together; larger ones are not held back. The author measures a mean end-to-end latency of 2.388 s in
the place of 2.931 s at 12 requests per second, and, in another setting, 13 in the place of 11
requests per second at a mean of 3 s at most.

Simplified: pieces of running prompts are not held back, only prompts that wait to be admitted, each
without what is cached of it. They are released once their tokens reach the threshold together, or
after `max_delay_steps` steps: both defaults, and what counts as enough, are ours, since only the
beginning of the request's description was found.

Cost: O(w) of w waiting requests looked at, at most `window`.

Needs: nothing.
"""

from itertools import islice
from typing import Any

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveInt,
    Request,
    SchedulerOutput,
)


class SmallPrefillsScheduler(BaseScheduler):
    """Decodes, then prompts by arrival; beside decodes, small ones once they are enough."""

    class Options(PolicyOptions):
        threshold: PositiveInt = 128  # prompt tokens, of one request or of those held back together
        max_delay_steps: PositiveInt = 4  # steps for which a small prompt is held back at most
        chunk_size: PositiveInt | None = None  # tokens per step (default: max_num_batched_tokens)
        window: PositiveInt = 64  # waiting requests looked at per step, oldest first

    options: Options

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.held_since: int | None = None  # step in which small prompts began to be held back

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        prefills = step.run_decodes()
        has_decodes = bool(step.requests)
        for request in prefills:
            step.run(request)
        if self.waiting and not (has_decodes and self.holds_back(prefills)):
            for request in self.waiting:
                if not step.admit(request):
                    break
        return step.output()

    def holds_back(self, prefills: list[Request]) -> bool:
        """Return whether the waiting prompts are too few tokens for a step, and not too old."""
        options, tokens = self.options, 0
        if not prefills:  # a step that carries a prompt anyway takes small ones as well
            for request in islice(self.waiting, options.window):
                tokens += request.num_tokens - self.kv_cache.estimate_cached_tokens(request)
                if tokens >= options.threshold:
                    break
            else:
                if self.held_since is None:
                    self.held_since = self.num_steps
                if self.num_steps - self.held_since < options.max_delay_steps:
                    return True
        self.held_since = None
        return False
