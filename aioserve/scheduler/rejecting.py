"""The verb `reject`: a waiting request ends before any work on it, and its client is told why.

Knows the step that says so. The engine, which ends the request, asks the book for it.
"""

from aioserve.request import Request, RequestStatus
from aioserve.scheduler.rejection import make_rejection
from aioserve.scheduler.request_table import OpenStep, RequestTable


class RejectingStep(OpenStep):
    """What a step does with requests that it turns away."""

    __slots__ = ()

    _book: RequestTable

    def reject(self, request: Request, reason: str, retry_after: float = 1.0) -> bool:
        """End a waiting request that never ran: its client is told the `reason`, and after how
        many seconds, a day at most, to ask again. False: it does not wait, or has run.

        What comes again to an idle engine and states no time has to be served some day: what can
        never run, `add_request` refuses with `RequestError`.
        """
        book = self._book
        why = make_rejection(book.policy_name, reason, retry_after)
        if request not in book.waiting or request.status is not RequestStatus.WAITING:
            return False
        book.rejected[request] = why
        return True
