"""Ends of requests, as a policy hears of them before its next step: each with its finish reason."""

from collections.abc import Callable

from aioserve.request import Request
from aioserve.scheduler.length_prediction import LengthPredicting


class Hearing(LengthPredicting):
    """A scheduler that hears how its requests end, for the policy or to learn from it."""

    _on_end: tuple[Callable[[Request, str], None], ...]

    def on_finish(self, request: Request, reason: str) -> None:
        """Called before the next step for each request that has ended. The reason is "stop",
        "length", "abort", "timeout", "error" or "rejected".
        """

    def _end_hooks(self) -> tuple[Callable[[Request, str], None], ...]:
        """What is to be called with each request that has ended; nothing unless a policy asks."""
        hears = type(self).on_finish is not Hearing.on_finish
        return (*self._length_hooks(), *((self.on_finish,) if hears else ()))

    def _tell_ends(self, ended: list[Request]) -> None:
        """Tell of requests that ended since the last step; the next step tells of later ends."""
        self.book.just_ended = []
        for request in ended:
            for tell in self._on_end:
                tell(request, request.status.finish_reason or "")
