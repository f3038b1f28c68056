"""Notes of each request when a piece of its prompt was planned, and when it left and came back.

Observes the step loop only where traces are wanted. Knows no spans: `engine.delivery.tracing` makes
them when a request has ended, and takes its notes away.
"""

from typing import NamedTuple

from aioserve.request import Request
from aioserve.scheduler import SchedulerOutput
from aioserve.step_loop import StepObserver


class Chunk(NamedTuple):
    """A piece of a prompt, or of what is computed again, in a step. Times are the scheduler's."""

    time: float  # when the step was planned
    step_id: int
    num_tokens: int
    num_computed: int  # before it, cached ones included


class Timeline:
    """What happened to one request, step by step, for its trace."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.chunks: list[Chunk] = []
        self.left: list[tuple[str, float]] = []  # how it left the batch, and when
        self.resumed: list[float] = []  # when it came back; not yet, after the last of `left`

    def leave(self, name: str, now: float) -> None:
        """The request is "preempted" or "paused" (`name`), or preempted after it was paused."""
        if len(self.left) > len(self.resumed):
            self.resumed.append(now)
        self.left.append((name, now))


class Timelines(StepObserver):
    """The notes on all requests of one engine whose traces are not made yet."""

    def __init__(self) -> None:
        self._timelines: dict[str, Timeline] = {}
        self._prefilling: dict[str, Timeline] = {}  # of these, those whose prompt is not computed

    def take(self, request_id: str) -> Timeline | None:
        """The notes on a request that has ended; None if it was never accepted."""
        self._prefilling.pop(request_id, None)
        return self._timelines.pop(request_id, None)

    def on_added(self, request: Request, now: float) -> None:
        self._timelines[request.request_id] = Timeline(request)

    def on_planned(self, output: SchedulerOutput, now: float) -> None:
        if not (self._prefilling or output.scheduled_new_reqs or output.preempted_req_ids):
            return
        for request_id in output.preempted_req_ids:
            self._prefilling.pop(request_id, None)
            if (timeline := self._timelines.get(request_id)) is not None:
                is_paused = request_id in output.paused_req_ids
                timeline.leave("paused" if is_paused else "preempted", now)
        for new in output.scheduled_new_reqs:
            if (timeline := self._timelines.get(new.request_id)) is not None:
                self._prefilling[new.request_id] = timeline
                if timeline.left:
                    timeline.resumed.append(now)
        for request_id, timeline in list(self._prefilling.items()):
            if (num_tokens := output.num_scheduled_tokens.get(request_id)) is None:
                continue
            request = timeline.request
            end = request.num_computed_tokens
            timeline.chunks.append(Chunk(now, output.step_id, num_tokens, end - num_tokens))
            if end >= request.num_tokens:
                del self._prefilling[request_id]
