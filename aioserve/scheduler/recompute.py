"""Requests that rest on what a failed request was to compute: they are computed again.

Blocks can be found as soon as a step is planned that will write them. If a request of that step
then fails alone, requests admitted since may have begun behind blocks that were never written, and
their tokens mean nothing. Knows block hashes and steps in flight, not why a request fails.
"""

from collections.abc import Collection, Sequence

from aioserve.errors import PolicyError
from aioserve.request import Request, RequestStatus
from aioserve.scheduler.output import SchedulerOutput
from aioserve.scheduler.pausing import drop_paused
from aioserve.scheduler.request_table import Order, RequestTable


def failed_rows(requests: Sequence[Request], named: Collection[str]) -> list[Request]:
    """Which requests of a step that is back have failed: those that its result names, and those
    that were ended by an error since it was planned.
    """
    error = RequestStatus.FINISHED_ERROR
    return [r for r in requests if r.status is error or r.request_id in named]


def recompute_dependents(
    book: RequestTable,
    output: SchedulerOutput,
    requests: Sequence[Request],
    failed: Sequence[Request],
    order: Order,
) -> list[Request]:
    """After a step of these `requests`, let all wait anew that rest on what the `failed` were to
    compute; what this step and later ones bring for them is dropped. Returns the requests that the
    policy could not put in line, which have ended with an error.
    """
    size, computed = book.kv_cache.block_size, _computed_before(output)
    lost: set[bytes] = set()
    for request in failed:
        lost.update(request.block_hashes[computed[request.request_id] // size :])
    found: dict[Request, RequestStatus | None] = {}
    for step, rows in ((output, requests), *book.in_flight):
        if not step.scheduled_new_reqs:  # only admissions begin behind blocks of others
            continue
        by_id = {request.request_id: request for request in rows}
        for data in step.scheduled_new_reqs:
            request, num_found = by_id[data.request_id], data.num_computed_tokens // size
            if not lost.isdisjoint(request.block_hashes[:num_found]):
                lost.update(request.block_hashes[num_found:])
                if request not in failed:
                    found[request] = None
    if not found:
        return []
    book.stale.update(found)
    for request in found:
        book.kv_cache.forget(request)
        if request.status is RequestStatus.PAUSED:
            drop_paused(book, request)
    running = {r: status for r, status in found.items() if r.status is RequestStatus.RUNNING}
    try:
        book.requeue(running, order)
    except PolicyError:  # none of them may run on, and there is no place for them in the line
        for request in running:
            book.finish(request, RequestStatus.FINISHED_ERROR)
        book.drop_finished()
        return list(running)
    for request in running:
        book.take_back(request)
    book.tell_preempted(running)
    return []


def _computed_before(output: SchedulerOutput) -> dict[str, int]:
    """How many tokens of each request were computed before a step."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed.update((d.request_id, d.num_computed_tokens) for d in output.scheduled_new_reqs)
    return computed
