"""The steps that are with the runner: planned, and not back.

Knows which step carries whom. Does not know what is done with requests that end meanwhile.
"""

from collections import deque

from aioserve.request import Request
from aioserve.scheduler.output import SchedulerOutput


class StepsInFlight(deque[tuple[SchedulerOutput, list[Request]]]):
    """Steps with their rows, in the order in which they were planned and will come back."""

    def withdraw(self, output: SchedulerOutput) -> list[Request]:
        """The newest step does not go to the runner after all: its rows; none if it had none."""
        if self and self[-1][0] is output:
            return self.pop()[1]
        return []

    def carries(self, request: Request) -> bool:
        """Whether a step in flight has the request among its rows."""
        return any(request in requests for _, requests in self)

    def num_tokens(self, request: Request) -> int:
        """Tokens of the request that steps in flight compute, drafts included."""
        return sum(
            output.num_scheduled_tokens[request.request_id]
            for output, requests in self
            if request in requests
        )

    def requests(self) -> set[Request]:
        """All requests that are rows of a step in flight."""
        return {request for _, requests in self for request in requests}
