"""What a call tells its router, and what the router tells it back.

In one process: nothing of it travels to a replica. Knows no Ray.
"""

import asyncio
from collections.abc import Set

from aioserve.routing import Assignment, Choice, Replica, RoutedRequest

#: The keyword of a call that holds its `Route`.
ROUTE = "route"


class Route:
    """The way of one call to one replica."""

    def __init__(
        self,
        request: RoutedRequest,
        *,
        avoid: Set[Replica] = frozenset(),
        only: Replica | None = None,
    ) -> None:
        """`avoid` have failed it before: they come last. With `only` no other will do."""
        self.request = request
        self.avoid = avoid
        self.only = only
        self.chosen: tuple[Replica, Choice] | None = None  # by the router, the last time
        self._assignment: Assignment | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the router
        self._is_over = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None, since a replica needs nothing of it."""
        return type(None), ()

    @property
    def replica(self) -> Replica | None:
        """The replica that has the call; None before one is assigned."""
        return None if self._assignment is None else self._assignment.replica

    def assign(self, replica: Replica) -> None:
        """The call was sent to this replica. On the router's loop."""
        cached = 0
        if self.chosen is not None and self.chosen[0] is replica:
            cached = self.chosen[1].num_cached_tokens
        self._loop = asyncio.get_running_loop()
        self._assignment = Assignment(replica, self.request, cached)
        if self._is_over:  # its caller has left while it was on the way
            self._assignment.has_ended()

    def has_started(self) -> None:
        """The first token is here. From any thread."""
        if self._assignment is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._assignment.has_started)

    def has_ended(self) -> None:
        """The call has ended or failed, or its caller has left. From any thread."""
        self._is_over = True
        if self._assignment is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._assignment.has_ended)
