"""A policy that pauses requests at every turn, for tests of engines: nothing of it may show."""

from typing import ClassVar

from aioserve.scheduler import BaseScheduler, SchedulerOutput, Step


class PausesAtEveryTurn(BaseScheduler):
    """Order of arrival; in two of three steps half of those that run are paused, before or after
    they were given tokens, so that prompts and replies stop anywhere.
    """

    num_pauses: ClassVar[int] = 0

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(16)
        turn = step.step_id
        if turn % 3 == 0:
            self.pause(step, turn)
        for request in step.run_decodes():
            step.run(request)
        if turn % 3 == 1:
            self.pause(step, turn)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()

    def pause(self, step: Step, turn: int) -> None:
        for request in self.running[turn // 3 % 2 :: 2]:
            type(self).num_pauses += step.pause(request)
