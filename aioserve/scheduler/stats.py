"""What metrics and the page ask of a scheduler: statistics, wait reasons, gauges of the policy.

Reads the table and changes nothing. Gauges are asked for when somebody looks, never in a step; what
is wrong with them costs a line of the log.
"""

import logging
import re
import sys
from typing import Any, Protocol

from aioserve.errors import FROM_OUTSIDE, PolicyError
from aioserve.outputs import SchedulerStats
from aioserve.request import WaitReason
from aioserve.scheduler.blame import place
from aioserve.scheduler.table import RequestTable

logger = logging.getLogger(__name__)

MAX_GAUGES = 32  # of one policy
_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")


def wait_reasons(book: RequestTable) -> dict[str, WaitReason]:
    """Return why each waiting request waits, as `SchedulerInterface.get_wait_reasons` says. A
    request that the policy did not ask for waits for what the one lacked at which the policy
    stopped, if it stands behind that one; the policy has passed over those before it for a reason
    of its own.
    """
    in_flight = book.in_flight.requests()
    step_id, last_asked, lacking = book.line_stop
    lacking = lacking if step_id == book.num_steps else None
    reasons = {
        request.request_id: (
            WaitReason.IN_FLIGHT
            if request in in_flight
            else request.wait_reason
            if request.wait_step_id == book.num_steps
            else WaitReason.PAUSED
            if request in book.paused
            else WaitReason.POLICY
            if lacking is None or (last_asked is not None and request.order_key < last_asked)
            else lacking
        )
        for request in book.waiting
    }
    aside = (request.request_id for request in book.aside)
    return reasons | dict.fromkeys(aside, WaitReason.REMOTE_KVS)


def stats(book: RequestTable, policy: str, gauges: dict[str, float]) -> SchedulerStats:
    """Statistics of the scheduler, as `SchedulerInterface.make_stats` says."""
    kv_cache = book.kv_cache
    of_resources = [resource.stats() for resource in kv_cache.resources]
    return SchedulerStats(
        num_steps=book.num_steps,
        num_running_reqs=len(book.running),
        num_waiting_reqs=len(book.requests) - len(book.running),
        num_paused_reqs=len(book.paused),
        num_waiting_tokens=book.waiting.num_tokens + sum(r.num_tokens for r in book.aside),
        num_kv_blocks=kv_cache.pool.num_blocks,
        num_used_kv_blocks=kv_cache.pool.num_used_blocks,
        num_leased_kv_blocks=kv_cache.leases.num_held_blocks if kv_cache.leases else 0,
        num_leases=len(kv_cache.leases),
        num_preemptions=book.num_preemptions,
        num_prefill_tokens=book.num_prefill_tokens,
        num_decode_tokens=book.num_decode_tokens,
        num_prefix_queried_tokens=kv_cache.num_queried_tokens,
        num_prefix_hit_tokens=kv_cache.num_hit_tokens,
        num_draft_tokens=book.num_draft_tokens,
        num_accepted_tokens=book.num_accepted_tokens,
        policy=policy,
        policy_gauges=gauges,
        **{name: number for found in of_resources for name, number in found.items()},
    )


class Gauging(Protocol):
    """A policy that shows numbers of its own."""

    def gauges(self) -> dict[str, float]:
        """Return the numbers to show, by name."""


class GaugeReader:
    """A reader of the gauges of a policy; what is wrong with them is logged once."""

    def __init__(self, policy: Gauging) -> None:
        self._policy = policy
        self._was_told = False

    def read(self) -> dict[str, float]:
        """Return the gauges of the policy; none if there is something wrong with them."""
        try:
            return checked_gauges(self._policy)
        except PolicyError as error:
            if not self._was_told:
                self._was_told = True
                logger.warning("no gauges of the policy are shown: %s", error)
            return {}


def checked_gauges(policy: Gauging) -> dict[str, float]:
    """Return what `gauges` returns. Raises `PolicyError` if it raises or returns anything else than
    it may.
    """
    name = type(policy).__name__
    try:
        found: Any = policy.gauges()
    except FROM_OUTSIDE:
        raise
    except BaseException as error:
        raise PolicyError(
            f"policy {name} raised {error!r} in gauges(){place(error, type(policy))}"
        ) from error
    if not isinstance(found, dict) or len(found) > MAX_GAUGES:
        what = f"{len(found)} of them" if isinstance(found, dict) else f"{found!r:.80}"
        raise PolicyError(
            f"policy {name}: gauges() must return a dict of up to {MAX_GAUGES} numbers, got {what}"
        )
    for key, value in found.items():
        if not isinstance(key, str) or not _NAME.fullmatch(key):
            raise PolicyError(
                f"policy {name}: gauges() names a gauge {key!r:.80}: names have up to 48 "
                "characters of a-z, 0-9 and _, a letter first"
            )
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise PolicyError(
                f"policy {name}: gauge {key!r} must be a finite number, got {value!r:.80}"
            )
    return {key: float(value) for key, value in found.items()}
