"""A step that serves at most a number of requests, whatever seats and tokens are left."""

from typing import Any

from aioserve.errors import PolicyError
from aioserve.kv_cache import Vacancy
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler.pausing import Place
from aioserve.scheduler.request_table import RequestTable
from aioserve.scheduler.step import Step


class BoundedStep(Step):
    """A `Step` whose verbs grant nothing once `max_requests` requests have tokens in it."""

    __slots__ = ("_max_requests",)

    def __init__(self, max_requests: int, book: RequestTable, *args: Any) -> None:
        """`args` as of `Step`. Raises `PolicyError` for a bound that is no number of requests."""
        if not isinstance(max_requests, int) or max_requests < 0:
            raise PolicyError(
                f"policy {book.policy_name}: new_step() takes max_requests as an int of 0 or more, "
                f"got {max_requests!r:.80}"
            )
        super().__init__(book, *args)
        self._max_requests = max_requests

    def run_decodes(self) -> list[Request]:
        prefills = []
        for request in self._book.running:
            if request.num_computed_tokens + 1 < request.num_tokens:
                prefills.append(request)
            else:
                self.run(request)
        # The victims of those that ran above do not run any more.
        return [r for r in prefills if r.status is RequestStatus.RUNNING]

    def run(self, request: Request, max_tokens: int | None = None) -> int:
        return 0 if len(self.tokens) >= self._max_requests else super().run(request, max_tokens)

    def _find_place(
        self, request: Request, max_tokens: int | None, whole: bool, gone: Vacancy | None = None
    ) -> Place:
        if len(self.tokens) >= self._max_requests:
            return WaitReason.BUDGET
        return super()._find_place(request, max_tokens, whole, gone)
