"""Offload and prefetch: blocks of a request go to host memory, and come back before it runs."""

import random
from pathlib import Path
from typing import Any

import pytest

from aioserve import SamplingParams
from aioserve.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from aioserve.features.kv_connector import OffloadingConnector
from aioserve.kv_cache import KVCacheManager
from aioserve.lab.comparison.measures import RunMeasures
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.workload import Piece, Workload, WorkloadRequest
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.testing import SchedulerHarness
from aioserve.testing.contract import PolicyContract
from aioserve.testing.toy_runner import ToyStore, ToyWorker
from tests.slow import mostly_slow

RECIPE = Path(__file__).parents[2] / "examples/recipes/swapped_levels.py"


class RestlessScheduler(BaseScheduler):
    """Offloads, pauses and prefetches requests at every turn, each some times; nothing may come of
    it.
    """

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        turn = step.step_id
        if turn % 3 == 0:
            for request in self.running[turn % 2 :: 2]:
                if not (self.may_move(request) and step.offload(request)):
                    step.pause(request)
        for request in step.run_decodes():
            step.run(request)
        if turn % 3 == 1:
            for request in filter(self.may_move, self.running[turn % 2 :: 2]):
                step.offload(request)
        if turn % 5 == 0:
            for request in filter(self.may_move, self.paused_requests[:1]):
                step.offload(request)
        waiting = list(filter(self.may_move, self.waiting))
        for request in waiting[-1:] if turn % 2 else ():
            step.prefetch(request)
        for request in self.waiting:
            is_paused = request.status is RequestStatus.PAUSED
            if is_paused and turn % 4 < 2 and self.may_move(request):
                continue  # for a while: the next one may take its place
            if not step.admit(request):
                break
        for request in () if turn % 2 else waiting[:2]:
            step.prefetch(request)
        return step.output()

    def may_move(self, request: Request) -> bool:
        return request.num_preemptions <= 6


@pytest.mark.slow
class TestContract(PolicyContract):
    policy = RestlessScheduler
    max_examples = 60
    # It pauses what has just displaced another request: that is waste, and not what it is for.
    test_no_step_wastes_what_requests_hold = None  # type: ignore[assignment]


class Scripted(BaseScheduler):
    """Order of arrival; once each, the requests that are named are offloaded or prefetched, and
    those of `asides` are not admitted.
    """

    offloads: tuple[str, ...] = ()
    prefetches: tuple[str, ...] = ()
    asides: tuple[str, ...] = ()

    def schedule(self) -> SchedulerOutput:
        step = self.new_step()
        self.answers = [step.offload(self.named(name)) for name in self.offloads]
        self.answers += [step.prefetch(self.named(name)) for name in self.prefetches]
        self.offloads = self.prefetches = ()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            if request.request_id not in self.asides and not step.admit(request):
                break
        return step.output()

    def named(self, name: str) -> Request:
        request = self.get_request(name)
        assert request is not None
        return request


def harness(**setup: Any) -> SchedulerHarness:
    settings = {"num_blocks": 12, "block_size": 4, "max_model_len": 48, "num_host_slots": 20}
    return SchedulerHarness(Scripted, **{"kv_connector": "memory", **settings, **setup})


def scripted(found: SchedulerHarness, **script: tuple[str, ...]) -> Scripted:
    """The harness' policy, from now on with this script."""
    policy = found.scheduler
    assert isinstance(policy, Scripted)
    vars(policy).update(script)
    return policy


def displaced(found: SchedulerHarness) -> tuple[Request, int]:
    """Offload a request whose blocks then are another's; with the tokens that it had computed."""
    request = found.add_request("a", list(range(18)), max_tokens=12)
    for _ in range(3):
        found.step()
    num_computed = request.num_computed_tokens
    policy = scripted(found, offloads=("a",), asides=("a",))
    found.step()
    assert policy.answers == [num_computed // 4 * 4]
    assert request.status is RequestStatus.PREEMPTED
    found.add_request("b", [7] * 30, max_tokens=15)
    while "b" not in found.finished:
        found.step()
    return request, num_computed


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_offloaded_is_loaded_and_not_computed_again(depth: int) -> None:
    found = harness(pipeline_depth=depth)
    request, num_computed = displaced(found)
    scripted(found)
    found.step()
    num_before = len(found.steps)
    scripted(found, asides=())
    found.run_until_idle()
    (entered,) = [data for step in found.steps[num_before:] for data in step.scheduled_new_reqs]
    assert entered.num_computed_tokens == num_computed // 4 * 4
    assert request.num_preemptions == 1
    assert len(found.tokens["a"]) == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_prefetched_is_there_before_the_request_is_admitted(depth: int) -> None:
    found = harness(pipeline_depth=depth)
    request, num_computed = displaced(found)
    found.add_request("c", [9] * 5, max_tokens=12)
    found.step()
    policy = scripted(found, prefetches=("a",), asides=("a",))
    (planned,) = found.step()
    assert policy.answers == [num_computed // 4 * 4]
    assert planned.kv_connector_metadata is not None
    assert len(planned.kv_connector_metadata.loads) == num_computed // 4
    assert request.status is RequestStatus.PAUSED
    assert policy.paused_requests == [request]
    assert policy.memory.paused == num_computed // 4 * 4
    scripted(found, asides=())
    (admitting,) = found.step()
    assert [data.request_id for data in admitting.scheduled_new_reqs] == ["a"]
    told = admitting.kv_connector_metadata
    assert told is None or not told.loads
    found.run_until_idle()
    assert len(found.tokens["a"]) == 12


def test_what_is_prefetched_gives_way_first_and_is_found_again() -> None:
    found = harness()
    request, _ = displaced(found)
    scripted(found, prefetches=("a",), asides=("a",))
    found.step()
    other = found.add_request("c", [9] * 40, max_tokens=3)
    found.step()
    assert other.status is RequestStatus.RUNNING
    assert request.status is RequestStatus.PREEMPTED
    scripted(found, asides=())
    while not found.requests["a"].status.is_finished:
        found.step()
    found.run_until_idle()
    assert other.num_preemptions == 0


@pytest.mark.parametrize("setup", [{"kv_connector": "none"}, {"num_host_slots": 3}])
def test_a_request_that_cannot_be_offloaded_goes_on(setup: dict[str, Any]) -> None:
    """Without a connector, and without room in its host memory."""
    found = harness(**setup)
    request = found.add_request("a", list(range(18)), max_tokens=6)
    found.step()
    policy = scripted(found, offloads=("a",), prefetches=("a",))
    assert policy.estimate_offload(request).num_tokens == 0
    found.step()
    assert policy.answers == [0, 0]
    assert request.status is RequestStatus.RUNNING
    found.run_until_idle()
    assert request.num_preemptions == 0


def test_host_memory_is_kept_for_a_request_until_it_runs_or_has_left() -> None:
    found = harness(num_host_slots=10)
    connector = found.connector
    assert connector is not None
    request, num_computed = displaced(found)
    assert connector.slots.num_used_blocks == num_computed // 4
    assert connector.make_stats().num_kept_blocks == num_computed // 4
    found.add_request("c", [9] * 40, max_tokens=3)  # what it evicts does not displace that
    while "c" not in found.finished:
        found.step()
    assert connector.slots.num_used_blocks == num_computed // 4
    found.finish("a")
    assert connector.slots.num_used_blocks == connector.make_stats().num_kept_blocks == 0
    assert request.status is RequestStatus.FINISHED_ABORTED
    found.run_until_idle()


@pytest.mark.parametrize("is_discarded", [True, False])
def test_after_a_failed_step_nothing_counts_that_was_prefetched(is_discarded: bool) -> None:
    """Whether it has loaded the blocks, or will, is not known."""
    found = harness(pipeline_depth=2)
    request, _ = displaced(found)
    scripted(found, asides=("a",))
    found.add_request("c", [9] * 5, max_tokens=20)
    found.step()
    scripted(found, prefetches=("a",), asides=("a",))
    if is_discarded:
        found.discard_step()
    else:
        found.plan()
        assert request.status is RequestStatus.PAUSED
        found.fail_steps()
    assert request.status is RequestStatus.PREEMPTED
    assert not request.block_ids
    scripted(found, asides=())
    found.run_until_idle()
    assert len(found.tokens["a"]) == 12


class _Fitted:
    """50 ms to compute a token."""

    is_fitted = True
    seconds_per_prompt_token = 0.05


def test_the_price_is_what_the_copies_take_and_what_computing_would() -> None:
    worker = ToyWorker(8)
    worker.num_loaded, worker.load_seconds = 4, 0.4  # so far: 100 ms a block
    connector = OffloadingConnector(worker, 4)
    connector.step_time = _Fitted()
    kv_cache = KVCacheManager(16, 4, connector=connector)
    request = Request(RequestSpec("a", list(range(11)), SamplingParams(max_tokens=4)))
    request.bound_length(20)
    assert kv_cache.offload_price(request, 11).num_tokens == 0  # it holds nothing
    kv_cache.admit(request, [], 11)
    assert kv_cache.offload_price(request, 11) == pytest.approx((8, 0.2, 0.2, 0.4))
    connector.keep(request, 2)
    assert kv_cache.offload_price(request, 11) == pytest.approx((8, 0.0, 0.2, 0.4))
    assert kv_cache.offload_price(request, 3).num_tokens == 0  # no whole block
    producer = OffloadingConnector(worker, 4, store=ToyStore(worker), role="producer")
    assert producer.get_offload_price(request, 2).num_tokens == 0  # it loads nothing


def test_a_swapping_policy_computes_less_again_where_seats_and_memory_are_short() -> None:
    requests = tuple(
        WorkloadRequest(0.02 * i, (Piece(i, 1500 if i % 4 == 0 else 60),), 120) for i in range(40)
    )
    workload = Workload("w", requests)

    def run(connector: str) -> float:
        settings = EngineConfig(
            runner=RunnerConfig(runner="simulated"),
            cache=CacheConfig(num_kv_blocks=300, kv_connector=connector, kv_connector_gib=8),
            scheduler=SchedulerConfig(policy=f"{RECIPE}:SwappedLevelsScheduler", max_num_seqs=3),
        )
        measures = RunMeasures(simulate(settings, workload), workload, None)
        return float(measures.totals["wasted_share"])

    assert run("memory") < run("none") / 2


@pytest.mark.parametrize("seed", mostly_slow(range(24), but=range(8)))
def test_no_swapped_request_is_harmed_by_what_fails_around_it(seed: int) -> None:
    """Steps, rows and policies that fail, clients that leave, a cache that is reset: at random."""
    rng = random.Random(seed)
    found = SchedulerHarness(
        RestlessScheduler,
        num_blocks=rng.choice([11, 12, 14, 18]),
        block_size=4,
        max_num_seqs=rng.choice([2, 3]),
        max_model_len=44,
        num_host_slots=rng.choice([12, 120]),
        kv_connector=rng.choice(["memory", "disk"]),
        pipeline_depth=rng.choice([1, 2]),
        max_num_batched_tokens=rng.choice([80, 8]),
    )
    for _ in range(120):
        event, count = rng.random(), len(found.requests)
        is_open = found.num_in_flight < found.config.depth
        if event < 0.12:
            prompt = rng.choice([[], [1] * 12]) + [count % 9] * rng.randint(3, 26)
            found.add_request(f"r{count}", prompt, max_tokens=rng.choice([3, 16]))
        elif event < 0.8:
            found.step()
        elif event < 0.85 and found.num_in_flight:
            found.fail_steps()
        elif event < 0.9 and is_open and found.ledger.alive:
            found.discard_step()
        elif event < 0.93 and found.num_in_flight:
            rows = list(found.loop.in_flight[0].output.num_scheduled_tokens)
            found.receive(failed=rng.choices(rows) if rows else ())
        elif event < 0.96 and is_open:
            found.plan()
        elif event < 0.98 and count:
            found.finish(f"r{rng.randrange(count)}")
        elif event < 0.985:
            found.reset_prefix_cache()
    found.run_until_idle(20_000)
