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


class OffloadsAtEveryTurn(PausesAtEveryTurn):
    """Half of those that run are offloaded, else paused; the first that waits is prefetched."""

    num_offloads: ClassVar[int] = 0
    num_prefetches: ClassVar[int] = 0

    def pause(self, step: Step, turn: int) -> None:
        for request in self.running[turn // 3 % 2 :: 2]:
            if request.num_preemptions < 9 and step.offload(request):
                type(self).num_offloads += 1
            else:
                step.pause(request)
        for request in list(self.waiting)[-2:]:
            type(self).num_prefetches += step.prefetch(request) > 0
