"""The policy of the matrix: chunked prefill, which pauses and pins if its options say so."""

from typing import ClassVar

from aioserve.scheduler import BaseScheduler, PolicyOptions, PositiveInt, Request, SchedulerOutput

LEASE_SECONDS = 0.05


class MatrixPolicy(BaseScheduler):
    """Order of arrival. With `pauses`, half of those that run are paused at every third turn; with
    `pins`, the prefix of each request that ends is kept for a while.
    """

    class Options(PolicyOptions):
        chunk_size: PositiveInt = 512
        pauses: bool = False
        pins: bool = False

    num_pauses: ClassVar[int] = 0
    num_pins: ClassVar[int] = 0

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.options.chunk_size)
        turn = step.step_id
        if self.options.pauses and turn % 3 == 0:
            for request in self.running[turn // 3 % 2 :: 2]:
                type(self).num_pauses += step.pause(request)
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        if self.options.pins:
            type(self).num_pins += self.pin(request, self.clock() + LEASE_SECONDS) > 0
