"""The waiting line: requests in the order that the policy gave them.

Knows order keys. Does not know why a request waits or which one will be served.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import Any

from aioserve.errors import InvariantError
from aioserve.request import Request

order_key = attrgetter("order_key")
by_user: Callable[[Request], str] = attrgetter("user")


class RequestQueue:
    """Requests sorted by `order_key`, which is unique and fixed while a request waits.

    A sorted list: inserting moves pointers (some microseconds at 10,000), iterating costs only
    what is looked at, so a step's cost does not grow with the queue. Keys are a policy's: whatever
    comparing them does, no request is lost.
    """

    def __init__(self, group_by: Callable[[Request], str] = by_user) -> None:
        self.num_tokens = 0  # tokens of all waiting requests
        self._requests: list[Request] = []
        self._members: dict[Request, str] = {}  # with their groups
        self._group_by = group_by
        self._groups: dict[str, list[Request]] = {}  # each sorted the same way
        self._changed: set[str] | None = None  # groups whose first request changed; None: unasked
        self._version = 0  # bumped by every change, so that iterators can find their place again

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In order. The queue may change meanwhile: what comes in before the place is skipped."""
        return self._walk(0)

    def from_key(self, key: Any) -> Iterator[Request]:
        """In order, from the first request whose `order` is `key` or more: those before it cost
        nothing.
        """
        yield from self._walk(bisect_left(self._requests, (key,), key=order_key))

    def _walk(self, i: int) -> Iterator[Request]:
        version = self._version
        while i < len(self._requests):
            request = self._requests[i]
            last = request.order_key
            yield request
            if self._version == version:
                i += 1
            else:
                i = bisect_right(self._requests, last, key=order_key)
                version = self._version

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def add(self, request: Request) -> None:
        """Put a request in its place. If comparing keys raises, nothing has changed."""
        if request in self._members:
            raise InvariantError(f"{request!r} waits already")
        group = self._group_by(request)
        own = self._groups.get(group, [])
        place = bisect_right(self._requests, request.order_key, key=order_key)
        own_place = bisect_right(own, request.order_key, key=order_key)
        self._requests.insert(place, request)
        own.insert(own_place, request)
        if own_place == 0 and self._changed is not None:
            self._changed.add(group)
        self._groups[group] = own
        self._members[request] = group
        self.num_tokens += request.num_tokens
        self._version += 1

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands. Raises `InvariantError` if it does not wait."""
        if request not in self._members:
            raise InvariantError(f"{request!r} does not wait")
        group = self._members[request]
        own = self._groups[group]
        if own[0] is request and self._changed is not None:
            self._changed.add(group)
        for requests in (self._requests, own):
            del requests[_place(requests, request)]
        if not own:
            del self._groups[group]
        del self._members[request]
        self.num_tokens -= request.num_tokens
        self._version += 1

    def heads(self) -> list[Request]:
        """The first waiting request of every group, by `group_by`: of every user, unless the policy
        says otherwise. The cost does not grow with the queue.
        """
        return [requests[0] for requests in self._groups.values()]

    def head(self, user: str) -> Request | None:
        """The first waiting request of a user, or of the group of that name; None: none waits."""
        requests = self._groups.get(user)
        return None if requests is None else requests[0]

    def group(self, name: str) -> list[Request]:
        """The waiting requests of a group, in order; none if no request of the group waits."""
        return self._groups.get(name, []).copy()

    def take_changed(self) -> list[str]:
        """Groups whose `head` is another one than at the last call, or none; at first all groups.
        The same events give the same order.
        """
        changed, self._changed = self._changed, set()
        return list(self._groups) if changed is None else sorted(changed)

    def sort(self, changed: Iterable[Request]) -> None:
        """Put all requests in their places after the keys of `changed` have changed. If comparing
        keys raises, nothing else has changed.
        """
        requests, before = sorted(self._requests, key=order_key), self._groups
        members = self._members | {request: self._group_by(request) for request in changed}
        groups: dict[str, list[Request]] = {}
        for request in requests:
            groups.setdefault(members[request], []).append(request)
        if self._changed is not None:
            self._changed.update(
                group
                for group in before | groups
                if before.get(group, [None])[0] is not groups.get(group, [None])[0]
            )
        self._requests, self._members, self._groups = requests, members, groups
        self._version += 1


def _place(requests: list[Request], request: Request) -> int:
    """Where it stands; found the long way if its key says nothing, as NaN does."""
    with suppress(Exception):
        i = bisect_left(requests, request.order_key, key=order_key)
        if i < len(requests) and requests[i] is request:
            return i
    return requests.index(request)
