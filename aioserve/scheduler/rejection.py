"""Rejection: a policy ends a waiting request early, with a reason, before any work on it."""

import math

import msgspec

from aioserve.errors import PolicyError

MAX_REASON = 200  # characters


class Rejection(msgspec.Struct, frozen=True):
    """What the client of a rejected request is told."""

    reason: str
    retry_after: float  # seconds until it is worth to ask again


def make_rejection(policy_name: str, reason: str, retry_after: float) -> Rejection:
    """Raises `PolicyError` for a reason that is no text, or a time that is none."""
    if not isinstance(reason, str) or not 0 < len(reason) <= MAX_REASON:
        raise PolicyError(
            f"policy {policy_name}: reject() takes a reason of up to {MAX_REASON} characters, got "
            f"{reason!r:.80}"
        )
    if not isinstance(retry_after, int | float) or not 0 <= retry_after < math.inf:
        raise PolicyError(
            f"policy {policy_name}: reject() takes retry_after in seconds, got {retry_after!r:.80}"
        )
    return Rejection(reason, float(retry_after))
