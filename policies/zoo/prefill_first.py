"""Prefill first (vLLM as of 2023): waiting prompts run alone, and decodes wait for them.

Paper: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP'23, arXiv 2309.06180; the scheduler of vLLM 0.1 to 0.3.

Aim: full batches; the baseline that Sarathi-Serve and others beat.

Says: KV blocks are given as replies grow, not reserved, so that far more requests run at once. A
step is either prompts or decodes: while some waiting prompt fits, whole prompts run in order of
arrival and every stream stands still. When memory runs out, the newest request is preempted.

Simplified: a preempted request is computed again, and never swapped to the CPU.

Cost: constant for each request that runs or enters.

Needs: nothing.
"""

from aioserve.scheduler import BaseScheduler, SchedulerOutput


class PrefillFirstScheduler(BaseScheduler):
    """Whole prompts alone as long as one fits; decodes in steps without a prompt."""

    admits_in_order = "all"
    keeps_decoding = True
    runs_whole_prompts = True

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.waiting:
            if not step.admit(request, whole=True):
                break
        if not step.requests:
            for request in step.run_decodes():  # prompts that another policy left half-way
                step.run(request)
        return step.output()
