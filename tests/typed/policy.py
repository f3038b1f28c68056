"""A policy of a user, with an option of its own that is checked by its type."""

from aioserve.scheduler import BaseScheduler, PolicyOptions, PositiveInt, SchedulerOutput


class Mine(BaseScheduler):
    class Options(PolicyOptions):
        chunk_size: PositiveInt = 512

    options: Options

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(token_budget=self.options.chunk_size)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()
