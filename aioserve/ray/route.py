"""What a call tells its router, and what the router tells it back.

In one process: nothing of it travels to a replica. Knows no Ray.
"""

import asyncio
import time
from collections.abc import Callable, Set

from aioserve.routing import Assignment, Refuse, RoutedRequest, Wait

#: The keyword of a call that holds its `Route`.
ROUTE = "route"


class Route:
    """The way of one call to one replica."""

    def __init__(
        self,
        request: RoutedRequest,
        *,
        avoid: Set[str] = frozenset(),
        only: str | None = None,
        on_answer: Callable[[], object] = lambda: None,
    ) -> None:
        """`avoid` are names of replicas that have failed it before: they come last. With `only` no
        other will do. `on_answer` is called, on the router's thread, when the router names none.
        """
        self.request = request
        self.avoid = avoid
        self.only = only
        self.answer: Refuse | Wait | None = None  # of the router, in place of a replica
        self._on_answer = on_answer
        self._assignment: Assignment | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the router
        self._is_over = False

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None, since a replica needs nothing of it."""
        return type(None), ()

    @property
    def replica(self) -> str | None:
        """The name of the replica that has the call; None before one is assigned."""
        return None if self._assignment is None else self._assignment.name

    def answered(self, answer: Refuse | Wait) -> None:
        """The router turns the call away, or lets it wait. On the router's loop."""
        self.answer = answer
        self._on_answer()

    def assign(self, assignment: Assignment) -> None:
        """The call was sent to a replica. On the router's loop."""
        self._loop = asyncio.get_running_loop()
        self._assignment = assignment
        if self._is_over:  # its caller has left while it was on the way
            assignment.has_ended()

    def has_started(self) -> None:
        """The first token is here. From any thread."""
        if self._assignment is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._assignment.has_started, time.monotonic())

    def has_ended(self) -> None:
        """The call has ended or failed, or its caller has left. From any thread."""
        self._is_over = True
        if self._assignment is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._assignment.has_ended)
