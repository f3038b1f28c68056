"""What others ask about a book: statistics, and why each request waits.

Reads the book and changes nothing.
"""

from aioserve.outputs import SchedulerStats
from aioserve.request import WaitReason
from aioserve.scheduler.request_table import RequestTable


def wait_reasons(book: RequestTable) -> dict[str, WaitReason]:
    """Why each waiting request waits, as `SchedulerInterface.get_wait_reasons` says."""
    in_flight = book.in_flight.requests()
    reasons = {
        request.request_id: (
            WaitReason.IN_FLIGHT
            if request in in_flight
            else request.wait_reason
            if request.wait_step_id == book.num_steps
            else WaitReason.PAUSED
            if request in book.paused
            else WaitReason.POLICY
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
