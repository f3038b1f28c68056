"""What each key has of the server now: requests that run, and tokens of the last minute.

Counted in one place for all workers, the engine's process. Knows keys by their names, no HTTP.
"""

import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from aioserve.engine.observe.histogram import RecentRate
from aioserve.errors import KeyLimitError
from aioserve.server.access.keyring import Rights

# As for a full queue: not at once, and not so late that the server idles meanwhile. Guesses.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


#: Gives the place of a request back before its block ends; the second time nothing happens. After
#: it another request of the key is let in, wherever it comes: it is awaited before the client hears
#: the end.
Leave = Callable[[], Awaitable[None]]


class Entrance(Protocol):
    """Where a request of a key is let in, wherever that is counted."""

    def entered(self, name: str) -> AbstractAsyncContextManager[Leave]:
        """Inside the block one more request of that key runs. Raises `KeyLimitError`."""


class _Account:
    """One key's. A bucket that holds the tokens of a minute and fills evenly: below 0 it is in
    debt, for what a request takes is known when it has it.
    """

    __slots__ = ("_filled_at", "_size", "ends", "left", "num_running")

    def __init__(self, size: int | None, now: float) -> None:
        self.num_running = 0
        self.ends = RecentRate()
        self._size, self._filled_at = size or 0, now
        self.left = float(self._size)

    def fill(self, size: int, now: float) -> None:
        """To what there is now; a larger size than before comes with as many tokens more, of a
        smaller one as large a part is there, or owed: 0 is without a limit, and owes nothing.
        """
        self.left = min(self.left + (now - self._filled_at) * self._size / 60, self._size)
        if size < self._size:
            self.left *= size / self._size
        else:
            self.left += size - self._size
        self._size, self._filled_at = size, now

    def charge(self, num_tokens: int) -> None:
        """Take them out, where there is a limit."""
        if self._size:
            self.left -= num_tokens

    @property
    def seconds_to_pay(self) -> float:
        """Until the bucket is in debt no more."""
        return -self.left * 60 / self._size


class Accounts:
    """What each key has used of its limits, by the name of the key."""

    def __init__(
        self, rights_of: Callable[[str], Rights], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`rights_of` is asked for each request, by the name of its key; `clock` tells seconds."""
        self._rights_of = rights_of
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        #: Since the start: tokens of prompts that were accepted, and of outputs.
        self.num_tokens: Counter[str] = Counter()

    @asynccontextmanager
    async def entered(self, name: str) -> AsyncIterator[Leave]:
        """Count a request of the key as running inside the block, as `Entrance` says."""
        self.enter(name)
        has_left = False

        async def leave() -> None:
            nonlocal has_left
            if not has_left:
                has_left = True
                self.leave(name)

        try:
            yield leave
        finally:
            await leave()

    def enter(self, name: str) -> None:
        """Count one more running request of that key. Raises `KeyLimitError` that says when to come
        again: when one of its requests will have ended, at the rate at which recent ones ended; or
        when its bucket is in debt no more.
        """
        rights, now = self._rights_of(name), self._clock()
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(rights.tokens_per_minute, now)
        if rights.max_requests is not None and account.num_running >= rights.max_requests:
            rate = account.ends.per_second(now)
            raise KeyLimitError(
                f"key {name!r} has {account.num_running} requests running, as many as it may",
                _bounded(1 / rate if rate else MIN_RETRY_SECONDS),
            )
        account.fill(rights.tokens_per_minute or 0, now)
        if rights.tokens_per_minute is not None:
            if account.left <= 0:
                raise KeyLimitError(
                    f"key {name!r} has had its {rights.tokens_per_minute} tokens a minute, and "
                    f"{-account.left:.0f} more",
                    max(MIN_RETRY_SECONDS, account.seconds_to_pay),
                )
        account.num_running += 1

    def leave(self, name: str) -> None:
        """One that has entered has ended, somehow."""
        account = self._accounts[name]
        account.num_running -= 1
        account.ends.add(1, self._clock())

    def charge(self, name: str, num_tokens: int) -> None:
        """Add `num_tokens` of a request to what its key has used."""
        self.num_tokens[name] += num_tokens
        if (account := self._accounts.get(name)) is not None:
            account.charge(num_tokens)

    def num_running(self, name: str) -> int:
        """Of a key that is counted; else 0."""
        account = self._accounts.get(name)
        return 0 if account is None else account.num_running


def _bounded(seconds: float) -> float:
    return math.ceil(min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS))
