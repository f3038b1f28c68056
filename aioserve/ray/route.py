"""What a call tells its router, and what the router tells it back.

In one process: nothing of it travels to a replica. Knows no Ray.
"""

import asyncio

from aioserve.routing import Assignment, Choice, Replica, RoutedRequest

#: The keyword of a call that holds its `Route`.
ROUTE = "route"


class Route:
    """Of one call."""

    def __init__(self, request: RoutedRequest) -> None:
        self.request = request
        self.chosen: tuple[Replica, Choice] | None = None  # by the router, the last time
        self._assignment: Assignment | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the router

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickled it is None."""
        return type(None), ()

    def assign(self, replica: Replica) -> Assignment:
        """The call was sent to this replica. On the router's loop."""
        cached = 0
        if self.chosen is not None and self.chosen[0] is replica:
            cached = self.chosen[1].num_cached_tokens
        self._loop = asyncio.get_running_loop()
        self._assignment = Assignment(replica, self.request, cached)
        return self._assignment

    def has_started(self) -> None:
        """The first token is here. From any thread."""
        if self._assignment is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._assignment.has_started)
