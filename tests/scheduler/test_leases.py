"""A policy pins what a conversation will ask for again, and no other request starves for it."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aioserve.policies.priority import PriorityScheduler

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import PolicyError
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.request import Request, WaitReason
from aioserve.scheduler import BaseScheduler, SchedulerOutput, make_successor
from aioserve.scheduler.fallback import FallbackScheduler
from aioserve.testing import SchedulerHarness
from aioserve.testing.contract import PolicyContract, Subject
from aioserve.testing.harness import FAILURES
from aioserve.testing.state_machine import run_machine
from tests.kit import run, stats_of
from tests.processes import PATIENCE
from tests.slow import examples, mostly_slow
from tests.testing.pinning import PinsAndHates, PinsInChunks

TOOL_PAUSES = f"{Path(__file__).parents[2]}/examples/recipes/tool_pauses.py:ToolPausesScheduler"


class PinsEverything(BaseScheduler):
    """Keeps the prefix of whoever has ended for long, and of one that runs."""

    pins_running = True

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        for request in self.running:
            step.run(request)
        for request in self.waiting:
            if not step.admit(request):
                break
        if self.running and self.pins_running:
            self.pin(self.running[0], self.clock() + 50)
        return step.output()

    def on_finish(self, request: Request, reason: str) -> None:
        self.pin(request, self.clock() + 1000)
        if request.priority > 0:
            self.unpin(request)


class PinsEnded(PinsEverything):
    """Keeps the prefix of whoever has ended."""

    pins_running = False


@pytest.mark.slow
class TestContract(PolicyContract):
    @pytest.fixture
    def subject(self) -> Subject:
        return Subject(PinsEverything, max_examples=25)


def harness(**setup: Any) -> SchedulerHarness:
    return SchedulerHarness(PinsEnded, num_blocks=8, block_size=4, **setup)


def test_a_pinned_prefix_is_found_after_others_have_filled_the_cache() -> None:
    found = harness()
    found.add_request("a", list(range(13)), max_tokens=1)
    found.run_until_idle()
    found.add_request("b", list(range(50, 60)), max_tokens=2)
    found.add_request("c", list(range(70, 80)), max_tokens=2)
    found.step()
    assert found.scheduler.get_wait_reasons()["c"] is WaitReason.LEASES
    found.add_request("a2", [*range(13), 99], max_tokens=1)
    found.run_until_idle()
    assert found.ledger.lives["a2"].request.num_cached_tokens == 12


def test_when_nothing_runs_pinned_prefixes_make_room() -> None:
    found = harness()
    found.add_request("a", list(range(13)), max_tokens=1)
    found.run_until_idle()
    found.add_request("large", list(range(100, 128)), max_tokens=2)
    found.run_until_idle()
    assert found.ledger.lives["large"].finish_reason == "length"


def test_a_request_that_runs_alone_takes_pinned_blocks_before_it_would_be_its_own_victim() -> None:
    found = harness()
    found.add_request("a", list(range(13)), max_tokens=1)
    found.run_until_idle()
    found.add_request("b", list(range(50, 58)), max_tokens=18)
    found.run_until_idle()
    assert not any(step.preempted_req_ids for step in found.steps)
    assert found.ledger.lives["b"].finish_reason == "length"


def test_leases_end_with_the_policy_and_with_the_cache() -> None:
    for end in ("switch", "reset", "vacate"):
        found = harness()
        found.add_request("a", list(range(13)), max_tokens=1)
        found.run_until_idle()
        found.add_request("b", [7], max_tokens=1)
        found.run_until_idle()
        assert found.kv_cache.leases
        if end == "switch":
            make_successor(found.scheduler, FallbackScheduler, found.config)
        elif end == "reset":
            assert found.scheduler.reset_prefix_cache()
        else:
            found.scheduler.vacate()
        assert not found.kv_cache.leases
        assert found.kv_cache.pool.num_used_blocks == 0


class CountsEnds(PinsEnded):
    """Counts what it was told of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: list[str] = []

    def on_finish(self, request: Request, reason: str) -> None:
        super().on_finish(request, reason)
        self.told.append(request.request_id)


def test_a_switch_that_fails_leaves_leases_and_their_share_as_they_were() -> None:
    found = SchedulerHarness(CountsEnds, num_blocks=16, block_size=4, max_leased_share=0.5)
    for name in "abc":
        found.add_request(name, [ord(name)] * 9, max_tokens=1)
    found.run_until_idle()
    held = dict(found.kv_cache.leases.held)
    assert len(held) == 3
    for where in FAILURES:
        with pytest.raises(PolicyError):
            make_successor(
                found.scheduler,
                FAILURES[where],
                msgspec.structs.replace(found.config, max_leased_share=0.0),
            )
        assert found.kv_cache.leases.held == held
    found.add_request("d", [7] * 9, max_tokens=1)
    found.run_until_idle()
    found.add_request("e", [8], max_tokens=1)
    found.run_until_idle()
    assert isinstance(found.scheduler, CountsEnds)
    assert found.scheduler.told[-2:] == ["d", "e"]
    assert len(found.kv_cache.leases) == 4  # of eight blocks, which is the share that it had


@pytest.mark.parametrize(
    ("policy", "depth"),
    mostly_slow(itertools.product([PinsInChunks, PinsAndHates], [1, 2]), but=[(PinsAndHates, 2)]),
)
def test_leases_at_random_break_no_rule_on_a_random_day(
    policy: type[BaseScheduler], depth: int
) -> None:
    run_machine(
        policy, pipeline_depth=depth, max_examples=examples(6, slow=40 if depth == 1 else 20)
    )


def test_a_lease_ends_at_its_time_though_the_engine_is_idle() -> None:
    scheduler = SchedulerConfig(policy=TOOL_PAUSES, options={"ttl": 0.2})
    config = EngineConfig(runner=RunnerConfig(runner="simulated"), scheduler=scheduler)

    async def main(engine: AsyncEngine) -> None:
        params = SamplingParams(max_tokens=2)
        async for _ in engine.generate(list(range(100)), params, hints={"session": "s"}):
            pass
        await asyncio.sleep(0.1)
        assert stats_of(engine).num_leased_kv_blocks == 6
        await asyncio.sleep(0.2)  # virtual time
        assert stats_of(engine).num_used_kv_blocks == 0

    run(main, config)


def test_others_sessions_of_the_same_name_are_not_touched() -> None:
    found = harness()
    spec = {"max_tokens": 1, "hints": {"session": "s"}}
    found.add_request("a", list(range(9)), user="ann", **spec)
    found.run_until_idle()
    found.add_request("b", list(range(30, 39)), user="ben", **spec)
    found.run_until_idle()
    found.add_request("c", [1], max_tokens=1)
    found.run_until_idle()
    assert len(found.kv_cache.leases) == 2


async def test_metrics_say_what_leases_hold(tmp_path: Path) -> None:
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated"), scheduler=SchedulerConfig(policy=TOOL_PAUSES)
    )
    async with AsyncEngine(config) as engine:
        for prompt in (list(range(100)), [5]):
            params = SamplingParams(max_tokens=2)
            async for _ in engine.generate(prompt, params, hints={"session": str(prompt[0])}):
                pass
        stats = engine.get_stats()
        assert stats is not None
        assert stats.num_leased_kv_blocks == stats.num_used_kv_blocks == 6
        metrics = engine.internals.render_metrics([])
        assert b"aioserve_kv_cache_leased_blocks 6.0" in metrics
        assert b"aioserve_kv_cache_leases 1.0" in metrics


async def test_inspect_names_every_lease_with_its_conversation() -> None:
    config = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        scheduler=SchedulerConfig(policy="tests.scheduler.test_leases:PinsEnded"),
    )
    async with AsyncEngine(config) as engine:
        params = SamplingParams(max_tokens=2)
        spoken = {"session": "agent-7"}
        async for _ in engine.generate(list(range(100)), params, user="ann", hints=spoken):
            pass
        async for _ in engine.generate(list(range(200, 240)), params, request_id="single"):
            pass
        async with asyncio.timeout(PATIENCE):
            while True:  # a lease comes with the step after the end
                seen = engine.inspect()
                assert seen is not None
                assert seen.cache is not None
                if len(leases := seen.cache.leases) == 2:
                    break
                await asyncio.sleep(0.005)
        assert [(held.user, held.conversation, held.num_blocks) for held in leases] == [
            ("", "single", 2),
            ("ann", "agent-7", 6),
        ]
        assert all(900 < held.seconds_left <= 1000 for held in leases)
        assert seen.cache.num_used_blocks == seen.cache.num_leased_blocks == 8


class RaisesAtEnds(FallbackScheduler):
    """Serves by arrival; raises when a request has ended."""

    def on_finish(self, request: Request, reason: str) -> None:
        raise PolicyError("this policy fails")


def client_harness(**setup: Any) -> SchedulerHarness:
    return SchedulerHarness(FallbackScheduler, num_blocks=16, block_size=4, **setup)


KEPT = {"cache_seconds": 100}


def test_a_client_keeps_its_prefix_under_a_policy_that_pins_nothing() -> None:
    found = client_harness(max_client_leased_share=0.25)
    found.add_request("a", list(range(13)), max_tokens=1, hints=KEPT)
    found.run_until_idle()
    for i in range(9):
        found.add_request(f"b{i}", list(range(100 * i, 100 * i + 30)), max_tokens=2)
    found.run_until_idle()
    found.add_request("a2", [*range(13), 99], max_tokens=1)
    found.run_until_idle()
    assert found.ledger.lives["a2"].request.num_cached_tokens == 12
    found.wait(100)
    found.add_request("c", [1], max_tokens=1)
    found.run_until_idle()
    assert not found.kv_cache.leases


@pytest.mark.parametrize(
    ("share", "hints", "ends", "num_blocks"),
    [
        (0.25, KEPT, True, 3),
        (0.13, KEPT, True, 2),
        (0.0, KEPT, True, 0),
        (0.25, {"cache_seconds": -1}, True, 0),
        (0.25, {"cache_seconds": "long"}, True, 0),
        (0.25, {"cache_seconds": True}, True, 0),
        (0.25, KEPT, False, 0),
    ],
)
def test_a_client_keeps_what_its_share_allows_of_a_reply_that_ends(
    share: float, hints: dict[str, Any], ends: bool, num_blocks: int
) -> None:
    found = client_harness(max_client_leased_share=share)
    found.add_request("a", list(range(13)), max_tokens=3, hints=hints)
    if ends:
        found.run_until_idle()
    else:
        found.step()
        found.finish("a")
    found.add_request("b", [1], max_tokens=1)
    found.run_until_idle()
    assert found.kv_cache.leases.num_held_blocks == num_blocks


def test_no_client_keeps_a_prefix_for_more_than_an_hour() -> None:
    found = client_harness()
    found.add_request("a", list(range(13)), max_tokens=1, hints={"cache_seconds": 1e9})
    found.run_until_idle()
    found.add_request("b", [1], max_tokens=1)
    found.run_until_idle()
    [lease] = found.kv_cache.leases.held.values()
    assert 3500 < lease.until - found.now <= 3600


def test_what_a_client_keeps_gives_way_before_a_request_is_preempted() -> None:
    found = client_harness(max_client_leased_share=0.5)
    found.add_request("a", list(range(29)), max_tokens=1, hints=KEPT)
    found.run_until_idle()
    for name in "bc":
        found.add_request(name, [ord(name)] * 9, max_tokens=20)
    found.run_until_idle()
    assert not found.kv_cache.leases
    assert not any(step.preempted_req_ids for step in found.steps)


def test_what_a_client_keeps_gives_way_before_an_urgent_request_displaces_another() -> None:
    found = SchedulerHarness(PriorityScheduler, num_blocks=16, block_size=4, watermark=0)
    found.kv_cache.leases.max_client_blocks = 8
    found.add_request("a", list(range(29)), max_tokens=1, hints=KEPT)
    found.run_until_idle()
    running = found.add_request("b", [7] * 13, max_tokens=8, priority=5)
    found.step()
    assert found.kv_cache.leases.num_held_blocks == 7
    found.add_request("urgent", [8] * 25, max_tokens=1, priority=1)
    found.run_until_idle()
    assert not found.kv_cache.leases
    assert running.num_preemptions == 0


def test_what_a_client_keeps_stays_where_an_urgent_request_lacks_a_seat_alone() -> None:
    found = SchedulerHarness(PriorityScheduler, num_blocks=64, block_size=4, max_num_seqs=1)
    found.kv_cache.leases.max_client_blocks = 8
    found.add_request("a", list(range(29)), max_tokens=1, hints=KEPT)
    found.run_until_idle()
    running = found.add_request("b", [7] * 13, max_tokens=8, priority=5)
    found.step()
    found.add_request("urgent", [8] * 25, max_tokens=1, priority=1)
    found.run_until_idle()
    assert running.num_preemptions == 1
    assert found.kv_cache.leases.num_held_blocks == 7


def test_a_policy_that_raises_at_an_end_keeps_no_client_from_its_lease() -> None:
    found = SchedulerHarness(RaisesAtEnds, num_blocks=16, block_size=4)
    for name in "ab":
        found.add_request(name, [ord(name)] * 9, max_tokens=1, hints=KEPT)
    found.step()
    found.add_request("c", [1], max_tokens=1)
    with pytest.raises(PolicyError):
        found.step()
    assert len(found.kv_cache.leases) == 2


def test_an_agents_next_turn_is_computed_once_under_memory_pressure() -> None:
    """Turns of two agents with pauses, among strangers that fill the cache in between."""
    requests: list[WorkloadRequest] = []
    for agent in range(2):
        for turn in range(4):
            follows = len(requests) - 1 if turn else -1
            pieces = tuple(Piece(100 * agent + i, 160) for i in range(turn + 1))
            requests.append(
                WorkloadRequest(0.5, pieces, 4, user="agents", follows=follows, session=agent)
            )
    requests += [WorkloadRequest(0.02 * i, (Piece(1000 + i, 150),), 30) for i in range(250)]
    cut = Workload("agents", tuple(requests))
    base = EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        cache=CacheConfig(num_kv_blocks=160, block_size=16),
        scheduler=SchedulerConfig(policy="chunked_prefill"),
    )
    hits = {}
    for policy in ("chunked_prefill", TOOL_PAUSES):
        scheduler = msgspec.structs.replace(base.scheduler, policy=policy)
        outcome = simulate(msgspec.structs.replace(base, scheduler=scheduler), cut)
        hits[policy] = sum(r.num_cached_tokens for r in outcome.requests[:8])
    assert hits[TOOL_PAUSES] == 2 * (160 + 320 + 480)
    assert hits["chunked_prefill"] < 0.5 * hits[TOOL_PAUSES]
