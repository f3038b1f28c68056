"""Offload and prefetch: a request's KV blocks go to host memory, and come back before it runs.

Preemption need not mean computing again: what is offloaded is kept for its request by the KV
connector, and loaded when the request is admitted, or before that. (FastServe, Wu et al., 2023, and
InferCept, Abhyankar et al., 2024, swap; TokenFlow, Chen et al., 2025, does it ahead of time.) Knows
blocks and which of them are whole; where they lie outside the pool, the connector knows.
"""

from aioserve.kv_cache import OffloadPrice, offload_price
from aioserve.request import Request, RequestStatus, WaitReason
from aioserve.scheduler.pausing import Pausing, PausingStep, drop_paused
from aioserve.scheduler.request_table import RequestTable

HOLDING = (RequestStatus.RUNNING, RequestStatus.PAUSED)
#: What a paused request holds beside KV blocks.
HELD_IN_PAUSE = (WaitReason.STATES, WaitReason.WINDOWS)


class Offloading(Pausing):
    """What a scheduler shows of paused requests, and of the price of offloading others."""

    def estimate_offload(self, request: Request) -> OffloadPrice:
        """What `step.offload` would keep of a running or paused request: `num_tokens`, and their
        `save_seconds`, `load_seconds` and, in place of both, `compute_seconds`; 0 seconds: not
        known yet. Without a KV connector, or room in its host memory, there are 0 tokens.
        """
        return offload_price(self.book.kv_cache, request, request.num_computed_tokens)


class OffloadingStep(PausingStep):
    """A step that moves KV blocks to host memory and back."""

    __slots__ = ()

    def offload(self, request: Request) -> int:
        """Preempt a running or paused request, and keep its KV blocks in host memory for it.

        They are copied in this step, by the KV connector, and loaded when the request is admitted
        again, or before by `prefetch`; what is behind the last whole block is computed again.
        Returns the tokens that are kept. 0: the request goes on as it is, since there is no
        connector (`--kv-connector`), too little room in its host memory, or no whole block.
        """
        connector = self._kv_cache.connector
        if connector is None or request.status not in HOLDING or request in self._admitted:
            return 0
        num_computed = request.num_computed_tokens - self.tokens.get(request, 0)
        num_tokens = offload_price(self._kv_cache, request, num_computed).num_tokens
        if num_tokens:
            connector.keep(request, num_tokens // self._kv_cache.block_size)
            self.preempt(request)
        return num_tokens

    def prefetch(self, request: Request) -> int:
        """Bring the KV blocks of a preempted request back into the cache before it is admitted.

        What host memory has of it is loaded in this step, or in the next one that serves a request,
        into free blocks alone, behind what the cache still has. The request holds all this from now
        on as a paused request does: `admit` lets it go on, and it is the first to give way. Returns
        the tokens that are there. 0: there is no connector, nothing to hold or no room for it, or
        the request was not preempted.
        """
        book, kv_cache = self._book, self._kv_cache
        is_away = request.status is RequestStatus.PREEMPTED and request not in self._preempted
        if kv_cache.connector is None or not is_away or book.in_flight.carries(request):
            return 0
        block_ids = kv_cache.get_computed_blocks(request)
        fresh = (i for i, block_id in enumerate(block_ids) if block_id in self._fresh_blocks)
        del block_ids[next(fresh, len(block_ids)) :]  # what this step computes may be taken back
        num_cached = len(block_ids) * kv_cache.block_size
        num_loaded = kv_cache.connector.get_external_prefix(request, num_cached).num_tokens
        num_tokens = num_cached + num_loaded
        if not num_tokens or not kv_cache.can_admit(block_ids, num_tokens, False, None):
            return 0
        if kv_cache.shortage(request) in HELD_IN_PAUSE:
            return 0
        kv_cache.admit(request, block_ids, num_tokens, num_loaded)
        for resource in kv_cache.resources:
            resource.pause(request)
        request.status = RequestStatus.PAUSED
        book.paused[request] = True
        return num_tokens


def drop_copies(book: RequestTable) -> None:
    """A step has failed or is not sent: what the connector copied in steps that are not back is not
    to be found, be there a request in them or not, and prefetched requests lose their blocks.
    """
    for request in [request for request, is_prefetched in book.paused.items() if is_prefetched]:
        drop_paused(book, request)
    if (connector := book.kv_cache.connector) is not None:
        connector.forget_unsettled()
