"""A policy ranks what requests leave in the KV cache, and the smallest rank is evicted first."""

import asyncio
import itertools
import json
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, RunnerConfig, SchedulerConfig, ShadowConfig
from aioserve.errors import PolicyError
from aioserve.lab import VirtualClockEventLoop
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.traces import read_trace
from aioserve.request import Hints, Request
from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.scheduler.fallback import FallbackScheduler
from aioserve.testing import SchedulerHarness
from aioserve.testing.contract import PolicyContract, Subject

RECIPES = Path(__file__).parents[2] / "examples/recipes"
REUSE = f"{RECIPES}/reuse_probability.py:ReuseProbabilityScheduler"


class RanksByPriority(FallbackScheduler):
    """What urgent requests leave stays longest."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.asked: deque[str] = deque(maxlen=20)  # what was asked for each request, in order

    def retention(self, request: Request) -> float:
        self.asked.append(f"{request.request_id} {request.status.name}")
        return -request.priority

    def on_finish(self, request: Request, reason: str) -> None:
        self.asked.append(f"{request.request_id} has ended")


class RanksAndPins(RanksByPriority):
    """Changes its mind about what runs, waits and has ended, and pins some of it."""

    def schedule(self) -> SchedulerOutput:
        for request in (*self.running[:2], *self.waiting.heads()):
            self.retain(request, self.num_steps % 5, 8 + self.num_steps % 9)
        return super().schedule()

    def on_finish(self, request: Request, reason: str) -> None:
        self.retain(request, request.num_tokens)
        if request.num_tokens % 3 == 0:
            self.pin(request, self.clock() + 5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [RanksByPriority, RanksAndPins])
class TestContract(PolicyContract):
    @pytest.fixture
    def subject(self, policy: type[BaseScheduler]) -> Subject:
        return Subject(policy, max_examples=25)


def harness(policy: type[BaseScheduler] = RanksByPriority, **setup: Any) -> SchedulerHarness:
    return SchedulerHarness(policy, **{"num_blocks": 12, "block_size": 4, **setup})


def serve(found: SchedulerHarness, name: str, first: int, **spec: Any) -> Request:
    """A request of three full blocks, of which the cache has what is left of earlier ones."""
    request = found.add_request(name, [first] * 13, max_tokens=1, **spec)
    found.run_until_idle()
    return request


def asked(found: SchedulerHarness) -> list[str]:
    return list(vars(found.scheduler)["asked"])


@pytest.mark.parametrize(("priority", "num_cached"), [(0, 12), (9, 0)])
def test_what_has_the_larger_rank_is_found_after_others_have_filled_the_cache(
    priority: int, num_cached: int
) -> None:
    found = harness()
    serve(found, "first", 1, priority=priority)
    for i in range(9):
        serve(found, f"other{i}", 10 + i, priority=5)
    assert serve(found, "again", 1, priority=priority).num_cached_tokens == num_cached


def test_a_policy_is_asked_once_after_it_has_heard_of_the_end() -> None:
    found = harness()
    serve(found, "a", 1)
    serve(found, "b", 2)
    ends = ["has ended", "FINISHED_LENGTH_CAPPED"]
    assert asked(found) == [f"{name} {end}" for name in "ab" for end in ends]


def test_what_a_preempted_request_leaves_is_ranked_before_it_is_evicted() -> None:
    found = harness(num_blocks=8, watermark=0, max_model_len=32)
    found.add_request("a", [1] * 16, max_tokens=12)
    found.add_request("b", [2] * 16, max_tokens=12)  # four full blocks, of which one is evicted
    while not any(step.preempted_req_ids for step in found.steps):
        assert not asked(found)
        found.step()
    assert asked(found) == ["b PREEMPTED"]
    assert found.kv_cache.estimate_cached_tokens(found.requests["b"]) == 12
    found.run_until_idle()


def test_an_end_that_leaves_nothing_in_the_cache_is_not_asked_about() -> None:
    found = harness()
    found.add_request("short", [1, 2], max_tokens=1)
    found.run_until_idle()
    assert asked(found) == ["short has ended"]


class Raises(RanksByPriority):
    """Raises for urgent requests, and says nothing sensible of some others."""

    def retention(self, request: Request) -> float:
        if request.priority < 0:
            raise LookupError("planted")
        return float("nan") if request.priority == 3 else 1.0


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        (
            -1,
            r"Raises raised LookupError\(.planted.\) in retention\(\) \(test_[^ ]*py:\d+\)$",
        ),
        (3, r"policy Raises: the retention of a request is a number, got nan for 'bad'"),
    ],
)
def test_a_policy_that_fails_to_rank_fails_in_its_step_and_loses_no_block(
    priority: int, message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        serve(harness(Raises), "bad", 1, priority=priority)
    found = harness(Raises, tolerates_errors=True)
    serve(found, "bad", 1, priority=priority)
    for i in range(6):
        serve(found, f"good{i}", 10 + i)
    assert len(found.errors) == 1
    assert {end.value for end in found.finished.values()} == {"length"}
    assert found.kv_cache.pool.num_free_blocks == 12


def test_a_policy_that_fails_to_rank_what_it_preempts_loses_no_block() -> None:
    found = harness(Raises, num_blocks=8, watermark=0, max_model_len=32, tolerates_errors=True)
    found.add_request("good", [1] * 16, max_tokens=12)
    found.add_request("bad", [2] * 16, max_tokens=12, priority=-1)  # it is asked for a block
    found.run_until_idle()
    assert any(isinstance(error, LookupError | PolicyError) for error in found.errors)
    assert found.kv_cache.pool.num_free_blocks == 8
    found.add_request("next", [3] * 16, max_tokens=12)
    found.run_until_idle()
    assert found.finished["next"].value == "length"


class Retains(BaseScheduler):
    """Has no `retention`, and ranks what urgent requests leave."""

    schedule = RanksByPriority.schedule

    def on_finish(self, request: Request, reason: str) -> None:
        if request.priority < 0:
            self.retain(request, 0.0)


@pytest.mark.parametrize(("priority", "num_cached"), [(-1, 12), (0, 0)])
def test_retain_alone_is_enough_and_what_has_no_rank_goes_first(
    priority: int, num_cached: int
) -> None:
    found = harness(Retains)
    serve(found, "first", 1, priority=priority)
    for i in range(9):
        serve(found, f"other{i}", 10 + i)
    assert serve(found, "again", 1).num_cached_tokens == num_cached


def test_a_policy_without_ranks_takes_over_from_one_with_them_and_back() -> None:
    found = harness()
    serve(found, "dear", 1, priority=-9)
    serve(found, "cheap", 2, priority=9)
    found.switch_policy(FallbackScheduler)
    assert found.kv_cache.retention is None
    assert found.kv_cache.pool.arrange is None
    serve(found, "a", 3)  # takes the unused blocks
    serve(found, "b", 4)  # takes the oldest
    assert serve(found, "cheap again", 2).num_cached_tokens == 12
    found.switch_policy(RanksByPriority)
    serve(found, "c", 5, priority=5)
    for i in range(9):
        serve(found, f"d{i}", 10 + i, priority=9)
    assert serve(found, "c again", 5).num_cached_tokens == 12


@pytest.mark.parametrize("where", ["__init__", "take_over", "order"])
def test_ranks_stay_when_a_switch_fails(where: str) -> None:
    found = harness()
    serve(found, "dear", 1, priority=-9)
    serve(found, "next", 2, priority=9)
    found.add_request("there", [3] * 9, max_tokens=9, priority=9)
    found.fail_switch(where)
    found.run_until_idle()
    for i in range(9):
        serve(found, f"other{i}", 10 + i, priority=5)
    assert serve(found, "again", 1).num_cached_tokens == 12


def test_ranks_hold_nothing_that_a_lease_or_a_reset_lets_go() -> None:
    found = harness(RanksAndPins)
    serve(found, "a", 1)
    serve(found, "b", 2)
    found.scheduler.vacate()
    assert found.scheduler.reset_prefix_cache()
    assert found.kv_cache.pool.num_unused_blocks == 12
    assert serve(found, "again", 1).num_cached_tokens == 0


def test_without_prefix_caching_no_rank_is_asked_for() -> None:
    found = harness(enable_prefix_caching=False)
    serve(found, "a", 1)
    assert asked(found) == ["a has ended"]


# Live, simulated, recorded, in shadow.


def chats_and_calls(path: Path) -> Path:
    """A trace as Qwen-Bailian's: chats of 6 turns with a pause of 8 s, and single calls."""
    rng = random.Random(4)
    lines: list[tuple[float, dict[str, Any]]] = []

    def add(at: float, chat: int, parent: int, kind: str, turn: int, blocks: list[int]) -> None:
        length = 16 * len(blocks)
        lines.append(
            (
                at,
                {
                    **{"chat_id": chat, "parent_chat_id": parent, "timestamp": at, "type": kind},
                    **{"turn": turn, "input_length": length, "output_length": 8},
                    "hash_ids": blocks,
                },
            )
        )

    for number in range(30):
        at, blocks, parent = rng.random() * 30, list[int](), -1
        for turn in range(6):
            blocks = [*blocks, *(1000 * number + 10 * turn + i for i in range(8))]
            add(at, 100 * number + turn, parent, "text", turn + 1, blocks)
            parent, at = 100 * number + turn, at + rng.uniform(6, 10)
    for call in range(700):
        blocks = [10**6 + 100 * call + i for i in range(12)]
        add(rng.random() * 80, 10**6 + call, -1, "api", 1, blocks)
    lines.sort(key=lambda line: line[0])
    path.write_text("".join(json.dumps(line) + "\n" for _, line in lines))
    return path


def config(num_blocks: int, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        runner=RunnerConfig(runner="simulated"),
        cache=CacheConfig(num_kv_blocks=num_blocks, block_size=16),
        scheduler=SchedulerConfig(**scheduler),
    )


@pytest.mark.slow
def test_on_chats_beside_single_calls_more_is_found_in_the_cache_than_by_lru(
    tmp_path: Path,
) -> None:
    trace = read_trace(chats_and_calls(tmp_path / "trace.jsonl"))
    found = {}
    for policy in ("chunked_prefill", REUSE):
        outcome = simulate(config(900, policy=policy), trace)
        asked = sum(r.num_prompt_tokens for r in trace.requests if r.kind == "text")
        found[policy] = sum(r.num_cached_tokens for r in outcome.requests) / asked
    assert found[REUSE] > 1.5 * found["chunked_prefill"]


async def serve_chat_beside_calls(engine: AsyncEngine) -> int:
    """What the third turn of a chat finds in the cache after many single calls."""
    found = 0
    for number in range(44):
        is_chat = number in (0, 1, 43)
        prompt = list(range(100, 400)) if is_chat else [1000 + number] * 300
        hints: Hints = {"type": "chat", "session": "s"} if is_chat else {"type": "call"}
        params = SamplingParams(max_tokens=2)
        async for output in engine.generate(prompt, params, hints=hints):
            found = output.num_cached_tokens
        await asyncio.sleep(1)  # virtual time
    return found


KEEPS_CHATS = """
from aioserve.scheduler import BaseScheduler

class KeepsChats(BaseScheduler):
    def retention(self, request):
        return request.hints["type"] == "chat"

    def schedule(self):
        step = self.new_step()
        for request in step.run_decodes():
            step.run(request)
        for request in self.waiting:
            step.admit(request)
        return step.output()
"""


def run_virtually(settings: EngineConfig) -> tuple[int, AsyncEngine]:
    async def serve_all() -> tuple[int, AsyncEngine]:
        async with AsyncEngine(settings) as engine:
            found = await serve_chat_beside_calls(engine)
            await asyncio.sleep(30)  # a shadow lives some seconds behind
            return found, engine

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        return runner.run(serve_all())


def test_a_live_engine_keeps_what_is_ranked_and_its_log_replays(tmp_path: Path) -> None:
    file = tmp_path / "keeps_chats.py"
    file.write_text(KEEPS_CHATS)
    found = []
    for policy in ("chunked_prefill", str(file)):
        log = tmp_path / f"{len(found)}.log"
        found.append(run_virtually(config(100, policy=policy, decision_log=str(log)))[0])
        assert replay(DecisionLog(log)).divergence is None
    assert found == [0, 288]


def test_the_shadow_of_a_policy_with_ranks_has_ranks_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()  # what it costs is told by how often it looks
    stopwatch = SimpleNamespace(perf_counter=lambda: 20e-6 * next(ticks))
    monkeypatch.setattr("aioserve.lab.shadow.time", stopwatch)
    file = tmp_path / "keeps_chats.py"
    file.write_text(KEEPS_CHATS)
    watched = ShadowConfig(shadow_policy=str(file), shadow_max_share=1.0)
    settings = msgspec.structs.replace(config(100, policy="chunked_prefill"), shadow=watched)
    found, engine = run_virtually(settings)
    assert found == 0
    shadow = engine.metrics.shadow.shadow
    assert shadow is not None
    assert not shadow.stats.is_failed
    assert shadow.scheduler.kv_cache.num_hit_tokens == 2 * 288
