"""Shortest prompt first without ageing: what nobody should deploy, as a contrast for the tests."""

from aioserve.scheduler import BaseScheduler, Request, SchedulerOutput


class ShortestFirstScheduler(BaseScheduler):
    """Decodes, then prompts by their length, in chunks."""

    def order(self, request: Request) -> int:
        return request.num_prompt_tokens

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(token_budget=512)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
