"""Keys that change while requests wait: `order` is asked again, for one, for many, on a period.

Knows the queue and its keys. What a key means is the policy's.
"""

from collections.abc import Iterable
from typing import Any

from aioserve.errors import FROM_OUTSIDE, InvariantError, PolicyError
from aioserve.request import Request
from aioserve.scheduler.request_table import Order, RequestTable
from aioserve.scheduler.succession import Switchable

FEW = 16  # times as many wait as get another key: then each is put in its place by itself


class Reordering(Switchable):
    """A scheduler whose waiting requests can get other keys than they came with."""

    #: Seconds after which `order` is asked again for every waiting request, before the next step:
    #: for keys that depend on the time. None: only on entry, and by `reorder` and `reorder_all`.
    #: May be set in `__init__`, from an option.
    reorder_every: float | None = None

    _ask_order: Order
    _reorder_at: float | None = None  # None: no request has waited yet

    def reorder(self, request: Request) -> None:
        """Ask `order` again for a request whose key has changed, if the request waits."""
        reorder(self.book, [request], self._ask_order)

    def reorder_all(self, requests: Iterable[Request] | None = None) -> None:
        """Ask `order` again for `requests`, such as `self.waiting.group(name)`, or all that wait.
        Costs an `order` for each and one sort. If `order` raises, nothing has changed.
        """
        reorder(self.book, self.book.waiting if requests is None else requests, self._ask_order)

    def _reorder_if_due(self, period: float) -> None:
        """Called while requests wait, so that steps without any need not be planned one by one."""
        now = self.clock()
        if self._reorder_at is not None and now >= self._reorder_at:
            self.reorder_all()
        elif self._reorder_at is not None:
            return
        self._reorder_at = now + period


def reorder(book: RequestTable, requests: Iterable[Request], order: Order) -> None:
    """Give waiting requests of `requests` new keys and places; nothing, if the policy raises."""
    before: dict[Request, Any] = {}  # of requests whose key is another one now
    keys: dict[Request, Any] = {}
    in_bulk = False
    try:
        for request in [request for request in requests if request in book.waiting]:
            old, key = request.order_key, order(request)
            if key != old[0]:
                before[request], keys[request] = old, (key, old[1])
        in_bulk = len(keys) * FEW >= len(book.waiting)
        _place(book, keys, in_bulk)
    except (InvariantError, *FROM_OUTSIDE):
        raise
    except BaseException as error:
        _place(book, before, in_bulk)
        if isinstance(error, PolicyError):
            raise
        raise PolicyError(
            f"policy {book.policy_name}: order() returned keys that cannot be compared: {error!r}"
        ) from error


def _place(book: RequestTable, keys: dict[Request, Any], in_bulk: bool) -> None:
    """Give waiting requests these keys; if that raises, some of them may be out of line."""
    waiting = book.waiting
    if in_bulk:
        for request, key in keys.items():
            request.order_key = key
        waiting.sort(keys)
        return
    for request in keys:
        if request in waiting:
            waiting.remove(request)
    for request, key in keys.items():
        request.order_key = key
        book.line_up(request)
