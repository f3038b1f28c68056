"""State per client: no client has more than `seats` requests running at once.

If a client has all its seats, its waiting requests are skipped and do not block others. The client
is `user` of the request; requests without one share a client.
"""

from collections import Counter

from aioserve.scheduler import (
    BaseScheduler,
    PolicyOptions,
    PositiveInt,
    SchedulerOutput,
    WaitReason,
)


class SeatsPerClientScheduler(BaseScheduler):
    """Order of arrival, but for clients who have their share of the seats."""

    class Options(PolicyOptions):
        seats: PositiveInt = 4  # most requests of one client that run at once

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in step.run_decodes():  # returns those that are half-way in their prompts
            step.run(request)
        seats = Counter(request.user for request in self.running)
        for request in self.waiting:
            if seats[request.user] >= self.options.seats:
                step.hold(request, WaitReason.POLICY)
            elif step.admit(request):
                seats[request.user] += 1
            else:
                break  # nobody passes one that does not fit, or it would never fit
        return step.output()
