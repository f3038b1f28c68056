"""What each key has of the server now: sequences that run, and tokens of the last minute.

Counted in one place for all workers, the engine's process; loaded where there are keys. Knows keys
by their names, no HTTP.
"""

import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aioserve.engine.metrics import RecentRate
from aioserve.errors import ForbiddenError, KeyLimitError
from aioserve.server.access.keys import ONE, Claim, Leave, Rights

# As for a full queue: not at once, and not so late that the server idles meanwhile. Guesses.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


class _Lease:
    """The part of its key's limits that a request holds once it has entered."""

    __slots__ = ("num_sequences", "num_tokens", "request_id")

    def __init__(self, claim: Claim, num_tokens: int) -> None:
        self.request_id = claim.request_id
        self.num_sequences = claim.num_sequences
        self.num_tokens = num_tokens  # taken out of the bucket for it, and not used so far


class _Account:
    """One key's. A bucket that holds the tokens of a minute and fills evenly: below 0 it is in
    debt, for one request may take more than a minute's tokens.
    """

    __slots__ = ("_filled_at", "_size", "ends", "leases", "left", "num_running")

    def __init__(self, size: int | None, now: float) -> None:
        self.num_running = 0  # sequences
        self.leases: dict[str, _Lease] = {}  # by the id of the request
        self.ends = RecentRate()
        self._size, self._filled_at = size or 0, now
        self.left = float(self._size)

    def fill(self, size: int, now: float) -> None:
        """Fill the bucket to what there is now; a larger size than before comes with as many tokens
        more, of a smaller one as large a part is there, or owed: 0 is without a limit, and owes
        nothing.
        """
        self.left = min(self.left + (now - self._filled_at) * self._size / 60, self._size)
        if size < self._size:
            self.left *= size / self._size
        else:
            self.left += size - self._size
        self._size, self._filled_at = size, now

    def charge(self, num_tokens: int, request_id: str) -> None:
        """Take tokens that a sequence has used out of what its request holds, and what that does
        not cover out of the bucket, where there is a limit.
        """
        lease = self._lease_of(request_id)
        if lease is not None:
            covered = min(num_tokens, lease.num_tokens)
            lease.num_tokens -= covered
            num_tokens -= covered
        if self._size:
            self.left -= num_tokens

    def _lease_of(self, request_id: str) -> _Lease | None:
        """Return the lease of the request of this id, or of one of its prompts or samples."""
        for _ in range(3):
            if (lease := self.leases.get(request_id)) is not None or not request_id:
                return lease
            request_id = request_id.rpartition("-")[0]
        return None

    def give_back(self, num_tokens: int) -> None:
        """Put tokens that were held, and not used, into the bucket, where there is a limit."""
        if self._size:
            self.left = min(self.left + num_tokens, self._size)

    def seconds_until(self, num_tokens: int) -> float:
        """Return seconds until the bucket holds `num_tokens`, if nothing is given back before; 0:
        until it is in debt no more.
        """
        return (num_tokens - self.left) * 60 / self._size


class Accounts:
    """The accounts of keys: what each has used of its limits, by the name of the key."""

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
    async def entered(self, name: str, claim: Claim = ONE) -> AsyncIterator[Leave]:
        """Count a request of the key as running inside the block, as `Entrance` says."""
        lease = self.enter(name, claim)
        has_left = False

        async def leave() -> None:
            nonlocal has_left
            if not has_left:
                has_left = True
                self.leave(name, lease)

        try:
            yield leave
        finally:
            await leave()

    def enter(self, name: str, claim: Claim = ONE) -> _Lease:
        """Count the sequences of one more running request of that key, and take the tokens that it
        may use out of its bucket. Returns what `leave` is to be given.

        Raises `KeyLimitError` that says when to come again: when enough of its sequences will have
        ended, at the rate at which recent ones ended; or when its bucket will hold what is asked
        for. Raises `ForbiddenError` for what it never may have. One sequence alone may be longer
        than a minute's tokens: it needs a full bucket.
        """
        rights, now = self._rights_of(name), self._clock()
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(rights.tokens_per_minute, now)
        if rights.max_requests is not None:
            self._check_sequences(name, account, rights.max_requests, claim.num_sequences, now)
        account.fill(rights.tokens_per_minute or 0, now)
        held = 0
        if rights.tokens_per_minute is not None:
            held = self._check_tokens(name, account, rights.tokens_per_minute, claim)
        account.left -= held
        account.num_running += claim.num_sequences
        lease = _Lease(claim, held)
        if claim.request_id:
            account.leases[claim.request_id] = lease
        return lease

    @staticmethod
    def _check_sequences(
        name: str, account: _Account, most: int, num_sequences: int, now: float
    ) -> None:
        if num_sequences > most:
            raise ForbiddenError(
                f"key {name!r} may have {most} requests running (max_requests), and this one would "
                f"be {num_sequences}, as prompts times samples: ask for fewer at a time",
                param="n",
            )
        num_over = account.num_running + num_sequences - most
        if num_over > 0:
            rate = account.ends.per_second(now)
            raise KeyLimitError(
                f"key {name!r} has {account.num_running} requests running, as prompts times "
                f"samples; it may have {most}, and this one would be {num_sequences}",
                _bounded(num_over / rate if rate else MIN_RETRY_SECONDS),
            )

    @staticmethod
    def _check_tokens(name: str, account: _Account, size: int, claim: Claim) -> int:
        """Return the tokens to be held for a request, of which there are enough."""
        if claim.num_tokens > size and not claim.is_one:
            raise ForbiddenError(
                f"key {name!r} has {size} tokens a minute, and this request may take "
                f"{claim.num_tokens}: ask for fewer prompts or samples, or a smaller max_tokens",
                param="max_tokens",
            )
        held = min(claim.num_tokens, size)
        if account.left <= 0:
            raise KeyLimitError(
                f"key {name!r} has used its {size} tokens a minute, and {-account.left:.0f} more",
                max(MIN_RETRY_SECONDS, account.seconds_until(held)),
            )
        if account.left < held:
            raise KeyLimitError(
                f"key {name!r} has {account.left:.0f} of its {size} tokens a minute left, and this "
                f"request may take {claim.num_tokens}",
                max(MIN_RETRY_SECONDS, account.seconds_until(held)),
            )
        return held

    def leave(self, name: str, lease: _Lease) -> None:
        """One that has entered has ended, somehow: what it held and has not used is given back."""
        account = self._accounts[name]
        account.num_running -= lease.num_sequences
        account.ends.add(lease.num_sequences, self._clock())
        account.give_back(lease.num_tokens)
        if account.leases.get(lease.request_id) is lease:
            del account.leases[lease.request_id]

    def charge(self, name: str, num_tokens: int, request_id: str = "") -> None:
        """Add `num_tokens` that a sequence of a request has used to what its key has used."""
        self.num_tokens[name] += num_tokens
        if (account := self._accounts.get(name)) is not None:
            account.charge(num_tokens, request_id)

    def num_running(self, name: str) -> int:
        """Return the sequences that run of a key that is counted; else 0."""
        account = self._accounts.get(name)
        return 0 if account is None else account.num_running


def _bounded(seconds: float) -> float:
    return math.ceil(min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS))
