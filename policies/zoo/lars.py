"""Least relative slack first (LARS of Medha, 2025): long prompts neither block nor starve.

Paper: Agrawal et al., "No Request Left Behind: Tackling Heterogeneity in Long-Context LLM Inference
with Medha", 2025, arXiv 2409.17264.

Aim: first tokens in time, for short and long prompts alike.

Says: the time until which a prompt is due grows with its length. Its slack is what is left until
then after the work that remains, and its relative slack is that over the whole time it was given.
The prompt with the least relative slack goes next, chunk by chunk, so that a long one yields to
short ones and still moves up. A step is as large as the pace of the decodes allows.

Simplified: one engine without sequence or KV-cache parallelism. Step times are fitted online, where
Medha profiles them. A paused prompt keeps its KV blocks.

Cost: O(w log w) of w waiting requests that are compared, at most `window`.

Needs: nothing; uses each request's own limit (hint `slo_ttft`), if it has one.
"""

from itertools import islice

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveFloat,
    PositiveInt,
    Request,
    RequestStatus,
    SchedulerOutput,
    hinted_number,
)


class LARSScheduler(BaseScheduler):
    """Decodes, then chunks of the prompts with the least slack for their length."""

    uses_step_time = True

    class Options(PolicyOptions):
        ttft: PositiveFloat = 1.0  # seconds until a short prompt's first token is due
        stretch: PositiveFloat = 5.0  # how many times its time alone a long prompt may take
        tpot: PositiveFloat = 0.05  # seconds that a step with decodes should take at most
        min_prefill_tokens: PositiveInt = 32  # tokens of prompts per step at least
        window: PositiveInt = 256  # waiting requests compared per step, oldest first

    options: Options

    def schedule(self) -> SchedulerOutput:
        step, model = self.new_step(), self.step_time
        prefills = step.run_decodes()
        decodes = step.requests
        budget = self.max_num_batched_tokens
        if decodes:
            num_context = sum(r.num_computed_tokens for r in decodes)
            budget = model.max_prefill_tokens(self.options.tpot, len(decodes), num_context)
            budget = max(budget, self.options.min_prefill_tokens)
        has_room = step.token_budget > 0 and len(self.running) < self.max_num_seqs
        window = self.options.window if has_room else 1  # the first still hears why it waits
        prompts = prefills + list(islice(self.waiting, window))
        may_admit = True
        for request in sorted(prompts, key=self.relative_slack):
            if request.status is RequestStatus.RUNNING:
                budget -= step.run(request, budget)
            elif may_admit:  # no request passes one that does not fit, or it would never fit
                granted = step.admit(request, budget)
                budget -= granted
                may_admit = granted > 0
        return step.output()

    def relative_slack(self, request: Request) -> float:
        """Return 1 on arrival of a prompt without work, 0 if it can just be in time, else less."""
        price = self.step_time.seconds_per_prompt_token
        done = request.num_computed_tokens or self.kv_cache.estimate_cached_tokens(request)
        ttft = hinted_number(request, "slo_ttft", self.options.ttft)
        given = max(ttft, self.options.stretch * price * request.num_prompt_tokens, 1e-6)
        remaining = price * (request.num_tokens - done)
        return (request.arrival_time + given - self.clock() - remaining) / given
