"""Rules of `SchedulerInterface` that hold after every call, and once no request is left.

Knows requests, places, blocks and leases as a harness sees them, and what is turned away. Calls
only what reads a scheduler.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Protocol

from aioserve.errors import EngineOverloadedError
from aioserve.outputs import FinishReason
from aioserve.request import SLO_TPOT, SLO_TTFT, Request, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.scheduler.stats import checked_gauges
from aioserve.testing.bench import Bench
from aioserve.testing.ledger import STATED, read_stated
from aioserve.testing.violation import ContractViolation

#: Names of the hints by which a request says how soon it is needed.
TIMES = (SLO_TTFT, SLO_TPOT)
MAX_RETRY_SECONDS = 86_400.0  # a guess: a client that is sent away for longer does not come back
#: How often a client asks again; it waits twice as long each time, as clients do.
NUM_TRIES = 6
MAX_KINDS = 4  # of requests that come again: the newest of each, which takes some steps


class Harness(Protocol):
    """The part of a harness that this module needs."""

    turned_away: list[tuple[Request, float]]  # and after how many seconds each may ask again

    @property
    def where(self) -> str:
        """The newest step, as messages begin."""

    @property
    def finished(self) -> dict[str, FinishReason]:
        """Why each request ended, of those that have."""

    def add_request(self, request_id: str, prompt_token_ids: list[int], **fields: Any) -> Request:
        """Add a request."""

    def wait(self, seconds: float) -> None:
        """Let time pass without a step."""

    def run_until_idle(self) -> None:
        """Step until every request has ended."""


def states_times(request: Request) -> bool:
    """Return whether the request says how soon it is needed: it may be turned away for being
    late.
    """
    return request.deadline is not None or any(name in request.hints for name in TIMES)


def ask_again(harness: Harness) -> None:
    """One token of prompt like each kind of request that was turned away comes to the idle engine,
    and states no time. Raises `ContractViolation` if that is turned away to the end.
    """
    for request, retry_after in _kinds(harness.turned_away):
        seconds = retry_after
        for number in range(NUM_TRIES):
            harness.wait(seconds)
            if _is_served(harness, f"{request.request_id}.{number}", request):
                break
            seconds = max(2 * seconds, 1.0)
        else:
            raise ContractViolation(
                f"{harness.where}: {request.request_id} was told to ask again in "
                f"{retry_after:.3g} s, and one token of prompt like it was turned away {NUM_TRIES} "
                f"times by an idle engine, the last time {seconds / 2:.3g} s after the one before: "
                "what can never run is refused with RequestError by add_request()"
            )


def _kinds(turned_away: list[tuple[Request, float]]) -> Iterator[tuple[Request, float]]:
    """Yield the newest request of each kind, of some kinds."""
    found = {repr(_fields(request)): (request, seconds) for request, seconds in turned_away}
    yield from list(found.values())[-MAX_KINDS:]


def _is_served(harness: Harness, name: str, like: Request) -> bool:
    try:
        harness.add_request(name, [1], max_tokens=1, **_fields(like))
    except EngineOverloadedError:
        return False
    harness.run_until_idle()
    return harness.finished[name] is not FinishReason.REJECTED


def _fields(request: Request) -> dict[str, Any]:
    """Return what a client says of a request, but for the times that it states."""
    hints = {name: value for name, value in request.hints.items() if name not in TIMES}
    fields = {
        "priority": request.priority,
        "user": request.user,
        "adapter_id": request.adapter_id,
        "hints": hints,
    }
    return {name: value for name, value in fields.items() if value}


# The rules of `SchedulerInterface` that hold after every call, and once no request is left. Knows
# requests, places, blocks and leases as a harness sees them. Calls only what reads a scheduler.


MIN_REJECTED = 5  # requests of a run that are all turned away: fewer may have been too many at once
#: A guess: twice the hour for which services keep prompts that clients pay for. What is pinned for
#: longer at each end holds its share of the cache for ever.
MAX_LEASE_SECONDS = 7_200.0


def check(bench: Bench) -> None:
    """Check that counts agree, each request has one place and block references are exact."""
    _check_counts(bench)
    bench.prefixes.take(bench.kv_cache.take_events())
    if isinstance(bench.scheduler, BaseScheduler):
        _check_places(bench, bench.scheduler)
        _check_keys(bench, bench.scheduler)
        if bench.reads_gauges:
            checked_gauges(bench.scheduler)
        paused = bench.scheduler.book.paused
        bench.planned.note_prefetched(r for r, is_prefetched in paused.items() if is_prefetched)
        _check_blocks(bench)
        _check_leases(bench)


def _check_counts(bench: Bench) -> None:
    scheduler, where = bench.scheduler, bench.where
    alive = bench.ledger.alive
    num_unfinished = scheduler.get_num_unfinished_requests()
    if num_unfinished != len(alive):
        raise ContractViolation(
            f"{where}: {num_unfinished} requests are unfinished, should be {len(alive)}: "
            f"{list(alive)}"
        )
    counts = scheduler.get_request_counts()
    if sum(counts) != len(alive) or scheduler.has_unfinished_requests() != bool(alive):
        raise ContractViolation(
            f"{where}: get_request_counts returns {counts}, has_unfinished_requests "
            f"{scheduler.has_unfinished_requests()}, with {len(alive)} requests"
        )
    if counts[0] > bench.config.max_num_seqs:
        raise ContractViolation(
            f"{where}: {counts[0]} requests run, max_num_seqs is {bench.config.max_num_seqs}"
        )
    has_finished, must_tell = scheduler.has_finished_requests(), bench.planned.must_tell()
    if has_finished and not bench.ledger.untold:
        raise ContractViolation(f"{where}: has_finished_requests, but the runner knows of all")
    if must_tell and not has_finished:
        raise ContractViolation(
            f"{where}: has_finished_requests is false, but the runner was not told of the end "
            f"of {must_tell}"
        )


def _check_places(bench: Bench, scheduler: BaseScheduler) -> None:
    """Check that each unfinished request runs or waits, as its status says."""
    running, loading = set(scheduler.running), scheduler.book.aside
    for life in bench.ledger.alive.values():
        request = life.request
        if (values := read_stated(request)) != life.stated:
            changed = zip(STATED, life.stated, values, strict=True)
            name, was, now = next(each for each in changed if each[1] != each[2])
            raise ContractViolation(
                f"{bench.where}: the policy has changed {name} of {life.request_id} from "
                f"{was!r} to {now!r}"
            )
        if _has_nan(request.order_key):
            raise ContractViolation(
                f"{bench.where}: order() returned {request.order_key[0]!r} for "
                f"{life.request_id}: NaN has no place in line"
            )
        is_paused = request in scheduler.book.paused
        if is_paused != (request.status is RequestStatus.PAUSED):
            raise ContractViolation(
                f"{bench.where}: {life.request_id} has status {request.status.name} and is "
                f"{'' if is_paused else 'not '}among the paused"
            )
        runs = request in running
        waits = (request in scheduler.waiting) != (request in loading)
        if runs == waits or runs != (request.status is RequestStatus.RUNNING):
            places = [w for w, there in (("running", runs), ("waiting", waits)) if there]
            raise ContractViolation(
                f"{bench.where}: {life.request_id} has status {request.status.name} and is in "
                f"{' and '.join(places) or 'neither running nor waiting'}"
            )


def _check_blocks(bench: Bench) -> None:
    pool = bench.kv_cache.pool
    holders = Counter(
        block_id
        for row in bench.planned.holders(bench.rows_in_flight)
        for block_id in row.block_ids
    )
    holders += bench.kv_cache.leases.references
    expected = [holders.get(block_id, 0) for block_id in range(pool.num_blocks)]
    if pool.ref_counts != expected:
        wrong = [b for b in range(pool.num_blocks) if pool.ref_counts[b] != expected[b]]
        names = {
            name: row.block_ids
            for name, row in bench.planned.rows.items()
            if set(row.block_ids) & set(wrong)
        }
        raise ContractViolation(
            f"{bench.where}: reference counts of blocks {wrong} are "
            f"{[pool.ref_counts[b] for b in wrong]}, should be {[expected[b] for b in wrong]}; "
            f"in the tables of {names or 'no request'}"
        )
    if pool.num_used_blocks != len(holders):
        raise ContractViolation(
            f"{bench.where}: {pool.num_used_blocks - len(holders)} blocks are lost"
        )


def _check_leases(bench: Bench) -> None:
    """Check that every lease ends, whether or not its conversation goes on."""
    for lease in bench.kv_cache.leases.held.values():
        if lease.until - bench.now > MAX_LEASE_SECONDS:
            raise ContractViolation(
                f"{bench.where}: pin() keeps the prefix of {lease.conversation} for "
                f"{lease.until - bench.now:g} s: a lease has to end though its conversation never "
                "comes again"
            )


def check_line(bench: Bench, output: SchedulerOutput) -> None:
    """Check the promise `admits_in_order`: no request was admitted before its predecessor."""
    scheduler = bench.scheduler
    if not isinstance(scheduler, BaseScheduler) or scheduler.admits_in_order is None:
        return
    requests = [life.request for life in bench.ledger.alive.values()]
    waits = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.PAUSED)
    waiting = [r for r in requests if r.status in waits and r not in bench.loading]
    for data in output.scheduled_new_reqs:
        admitted = bench.requests[data.request_id]
        for request in waiting:
            is_before = request.order_key < admitted.order_key
            if is_before and _is_one_line(scheduler, request, admitted):
                raise ContractViolation(
                    f"step {output.step_id}: {admitted.request_id} is admitted, but "
                    f"{request.request_id} stands before it and waits"
                )


def standing(bench: Bench) -> list[Any]:
    """State that a failed switch must not change: keys, the queue, running requests, leases."""
    if not isinstance(bench.scheduler, BaseScheduler):
        return []
    scheduler = bench.scheduler
    keys = [(request, request.order_key) for request in scheduler.get_requests()]
    leases, book = scheduler.kv_cache.leases, scheduler.book
    ended = None if book.just_ended is None else list(book.just_ended)
    places = [list(scheduler.waiting), list(scheduler.running), ended]
    shares = leases.max_blocks, leases.max_client_blocks
    return [scheduler, keys, *places, dict(leases.held), shares]


def check_standing(bench: Bench, before: list[Any]) -> None:
    if standing(bench) != before:
        raise ContractViolation(f"{bench.where}: a switch that failed has changed the line")
    check(bench)


def due(bench: Bench) -> set[str]:
    """Whose deadline or queue timeout has passed."""
    timeout = bench.config.queue_timeout
    return {
        life.request_id
        for life in bench.ledger.alive.values()
        if (life.request.deadline is not None and life.request.deadline <= bench.now)
        or (
            timeout is not None
            and not life.was_scheduled
            and life.request.arrival_time + timeout <= bench.now
        )
    }


def check_idle(bench: Bench) -> None:
    """Nothing remains: no request, no row in the runner's batch, no block."""
    if lost := list(bench.ledger.alive):
        raise ContractViolation(f"{bench.where}: requests were lost: {lost}")
    lives = bench.ledger.lives.values()
    ends = [life.finish_reason for life in lives if not states_times(life.request)]
    if len(ends) >= MIN_REJECTED and set(ends) == {FinishReason.REJECTED}:
        raise ContractViolation(f"{bench.where}: all {len(ends)} requests were rejected")
    if bench.num_refused >= MIN_REJECTED and not lives:
        raise ContractViolation(
            f"{bench.where}: add_request() has refused all {bench.num_refused} requests"
        )
    rows = sorted({*bench.runner.request_ids, *bench.planned.rows})
    if rows and not bench.errors:  # it could not be told by a policy that raises
        raise ContractViolation(f"{bench.where}: the runner was never told of the end of {rows}")
    pool = bench.kv_cache.pool
    if leaked := pool.num_used_blocks - bench.kv_cache.leases.num_held_blocks:
        raise ContractViolation(f"{bench.where}: {leaked} blocks leaked")
    for resource in bench.kv_cache.resources:
        if what := resource.held():
            raise ContractViolation(f"{bench.where}: {what} leaked")
    while bench.store:
        bench.store.answer()
    if bench.connector is not None and (leaked := bench.connector.num_held_slots):
        raise ContractViolation(f"{bench.where}: {leaked} slots of host memory leaked")
    bench.prefixes.check_lost(bench.where)
    _check_stats(bench)


def _check_stats(bench: Bench) -> None:
    stats = bench.scheduler.make_stats()
    if stats is None or bench.errors:
        return
    counted = stats.num_prefill_tokens + stats.num_decode_tokens
    if counted != bench.num_tokens_planned:
        raise ContractViolation(
            f"{bench.where}: make_stats counts {counted} tokens, but "
            f"{bench.num_tokens_planned} were scheduled"
        )


def _check_keys(bench: Bench, scheduler: BaseScheduler) -> None:
    """Check that requests wait in the order of their keys, which only verbs change."""
    for one, behind in pairwise(scheduler.waiting):
        if behind.order_key < one.order_key:
            raise ContractViolation(
                f"{bench.where}: {behind.request_id} with key {behind.order_key[0]!r} waits behind "
                f"{one.request_id} with key {one.order_key[0]!r}: keys change by reorder() alone"
            )


def _is_one_line(scheduler: BaseScheduler, one: Request, other: Request) -> bool:
    """Return whether the promise `admits_in_order` is about two requests."""
    match scheduler.admits_in_order:
        case "all":
            return True
        case "group":
            return scheduler.group_by(one) == scheduler.group_by(other)
        case _:
            return one.user == other.user


def _has_nan(key: object) -> bool:
    """Return whether it is NaN, or a tuple that has one."""
    if not isinstance(key, tuple):
        return bool(key != key)
    return any(_has_nan(part) if isinstance(part, tuple) else part != part for part in key)
