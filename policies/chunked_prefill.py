"""Chunked prefill (Sarathi-Serve, OSDI'24): decodes never wait for a long prompt.

Every step carries at most `chunk_size` tokens. Decodes come first; prompts fill what is left, a
piece at a time. Smaller chunks: steadier streams, more steps, later first tokens.
"""

from aioserve.scheduler import BaseScheduler, PolicyOptions, PositiveInt, SchedulerOutput


class ChunkedPrefillScheduler(BaseScheduler):
    """Decodes first, then prompts in chunks, until the step is full."""

    admits_in_order = "all"
    keeps_decoding = True

    class Options(PolicyOptions):
        chunk_size: PositiveInt = 512  # tokens per step, decodes included

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(token_budget=self.options.chunk_size)
        for request in step.run_decodes():  # returns those that are half-way in their prompts
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
