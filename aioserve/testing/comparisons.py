"""Rules that need a second run of the same calls: the same plans, without foresight or memory.

Knows calls and plans. Knows nothing about what a plan says.
"""

from collections.abc import Callable
from typing import Any

from aioserve.kv_cache import KVCacheManager
from aioserve.lab.simulation.stepped_engine import MultiStepDecode
from aioserve.scheduler import BaseScheduler
from aioserve.testing.bench import Bench
from aioserve.testing.calls import make_calls, with_other_ends
from aioserve.testing.decoding_promise import check_keeps_decoding as check_promise
from aioserve.testing.difference import differences
from aioserve.testing.foreign_calls import watched_calls
from aioserve.testing.violation import ContractViolation


def check_repeatable(bench: Bench) -> None:
    """Nothing but the calls may matter: no clock, no hash order, no global dice."""
    again = type(bench)(bench.policy, **bench.setup)
    again.reads_gauges = False  # to look at them must change nothing
    try:
        make_calls(again, [c for c in bench.calls if not c.method.startswith("check_")])
    finally:  # an error that did not come the first time is a difference, too
        for planned, expected in zip(again.steps, bench.steps, strict=False):
            if differ := differences(planned, expected):
                raise ContractViolation(
                    f"step {expected.step_id}: the same events gave another plan the second "
                    f"time: {differ}"
                )


def check_own_time(bench: Bench) -> None:
    """The same calls without a call of the process' clocks, dice or sleep by the policy."""
    again = type(bench)(bench.policy, **bench.setup)
    with watched_calls(bench.policy, lambda: again.where):
        make_calls(again, [c for c in bench.calls if not c.method.startswith("check_")])


def check_foresees_no_end(bench: Bench) -> None:
    """The same calls, with the lengths of the given replies dealt out in reverse, give the same
    plans until the first request has ended: a policy cannot know how long a reply will be.
    """
    check_repeatable(bench)  # dice would look like foresight
    calls = [call for call in bench.calls if not call.method.startswith("check_")]
    again = type(bench)(bench.policy, **bench.setup)
    make_calls(again, with_other_ends(calls))
    num_alike = min(_num_steps_before_ends(bench), _num_steps_before_ends(again))
    for planned, expected in zip(again.steps[:num_alike], bench.steps, strict=False):
        if differ := differences(planned, expected):
            raise ContractViolation(
                f"step {expected.step_id}: no reply has ended, but the plan tells how long "
                f"they will be: with the lengths dealt out in reverse, {differ}"
            )


def _num_steps_before_ends(bench: Bench) -> int:
    """Steps that were planned before the first request ended."""
    first = bench.ledger.first_end
    return len(bench.steps) if first is None else first


def check_keeps_decoding(bench: Bench) -> None:
    """What the policy promises with `keeps_decoding`, on requests of the kit's own, with the
    limits of this harness. Does nothing without the promise, or where nothing relies on it.
    """
    if not MultiStepDecode.is_promised_by(bench.policy):
        return
    if bench.config.depth > 1 or bench.config.num_lookahead_tokens:
        return
    num_blocks, size = bench.kv_cache.pool.num_blocks, bench.kv_cache.block_size

    def make(clock: Callable[[], float]) -> BaseScheduler:
        made: Callable[..., Any] = bench.policy
        cache = KVCacheManager(num_blocks, size)
        found = made(bench.config, cache, max_model_len=bench.max_model_len, clock=clock)
        assert isinstance(found, BaseScheduler), "it is promised by no other"
        return found

    with bench.blame("schedule"):
        check_promise(make, bench.max_model_len, bench.kv_cache.num_slots)
