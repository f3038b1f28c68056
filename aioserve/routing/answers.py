"""What a router answers in place of a replica: a refusal, a wait, two replicas, a migration.

Data that checks itself. What becomes of an answer is the sender's part.
"""

import math

import msgspec

from aioserve.routing.views import ReplicaView

#: Seconds that a request may wait for its router in all; then it is refused.
MAX_WAIT_SECONDS = 60.0
#: The shortest wait, in seconds: a router that says less is asked again after this.
MIN_WAIT_SECONDS = 0.001


class Refuse(msgspec.Struct, frozen=True):
    """The request is turned away: over HTTP by 429 with this reason and `Retry-After`."""

    reason: str
    retry_after: float = 1.0  # seconds

    def __post_init__(self) -> None:
        """Raises `ValueError` for a refusal without a reason, or a time that is none."""
        if not self.reason:
            raise ValueError("Refuse needs a reason, which the client is told; got an empty text")
        if not 0 <= self.retry_after < math.inf:
            raise ValueError(
                f"Refuse: retry_after is a finite number of at least 0, got {self.retry_after!r}"
            )


class Wait(msgspec.Struct, frozen=True):
    """The request stays with the sender, which asks again after `seconds`; in all it waits at most
    `MAX_WAIT_SECONDS`. Its deadline ends it meanwhile.
    """

    seconds: float

    def __post_init__(self) -> None:
        """Raises `ValueError` for a time that is not above 0, or above the bound."""
        if not 0 < self.seconds <= MAX_WAIT_SECONDS:
            raise ValueError(
                f"Wait takes seconds above 0 and up to {MAX_WAIT_SECONDS:g}, got {self.seconds!r}"
            )


class Split(msgspec.Struct, frozen=True):
    """The prompt is computed by `prefill` and the reply is made by `decode`, to which KV blocks are
    handed over behind the first token. For a router that states `splits = True`.
    """

    prefill: ReplicaView
    decode: ReplicaView


class Migrate(msgspec.Struct, frozen=True):
    """A running request moves to another replica with its KV blocks, while it decodes. An answer of
    `rebalance`, for a router that states `rebalance_seconds`. A request that has ended meanwhile
    stays ended, and one for which `to` has no room stays where it is.
    """

    request_id: str
    to: ReplicaView
