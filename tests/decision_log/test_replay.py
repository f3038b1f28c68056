"""What was recorded comes out again, step by step; what was changed is found and named."""

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from aioserve.policies.chunked_prefill import ChunkedPrefillScheduler
from aioserve.policies.fcfs import FCFSScheduler

from aioserve import AsyncEngine, SamplingParams
from aioserve.cli.main import main as command
from aioserve.engine import builder
from aioserve.errors import RequestFailedError
from aioserve.lab import VirtualClockEventLoop
from aioserve.lab.decision_log.reader import Chronicle, DecisionLog, Life
from aioserve.lab.decision_log.recorder import RecordingScheduler
from aioserve.lab.decision_log.records import (
    AnyRecord,
    Discarded,
    Header,
    Planned,
    Record,
    Switched,
)
from aioserve.lab.decision_log.replay import replay
from aioserve.scheduler import BaseScheduler, Request, SchedulerOutput
from aioserve.testing import SchedulerHarness
from tests.engine.test_policy_failures import BAD, RaisesInUpdate, RaisesMidway, ReturnsAnOldStep
from tests.lab.traffic import make_config, record
from tests.policy_names import SHIPPED
from tests.slow import mostly_slow

POLICIES = SHIPPED


class MemoryLog:
    """A sink that can be replayed; through MessagePack, as a file would be."""

    def __init__(self) -> None:
        self.encoded: list[bytes] = []

    def write(self, record: Record) -> None:
        self.encoded.append(msgspec.msgpack.encode(record))

    def flush(self) -> None: ...

    def close(self) -> None: ...

    def fail(self, error: Exception) -> None:
        raise error

    @property
    def header(self) -> Header:
        return msgspec.msgpack.decode(self.encoded[0], type=Header)

    def __iter__(self) -> Any:
        decoder = msgspec.msgpack.Decoder(AnyRecord)
        return iter([decoder.decode(data) for data in self.encoded[1:]])


def read(log: DecisionLog) -> Chronicle:
    chronicle = Chronicle(log.header)
    for item in log:
        chronicle.feed(item)
    return chronicle


@pytest.mark.parametrize("depth", mostly_slow([1, 2], but=[2]))
@pytest.mark.parametrize("policy", mostly_slow(POLICIES, but=["deadline", "mlfq"]))
def test_every_policy_decides_again_what_it_decided(
    policy: str, depth: int, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    lives: list[Life] = []
    for seed in range(3):
        is_failing = seed == 0
        record(path, policy=policy, pipeline_depth=depth, seed=seed, is_failing=is_failing)
        log = DecisionLog(path)
        result = replay(log)
        assert result.divergence is None
        assert result.num_steps > 100
        assert log.is_complete
        lives += read(log).lives
    reasons = {life.finish_reason for life in lives}  # the traffic was hard enough
    assert reasons == {"stop", "length", "abort", "timeout", "error"}
    assert sum(life.num_preemptions for life in lives) > 3
    assert sum(life.num_cached_tokens for life in lives) > 100


@pytest.mark.parametrize(
    "loop_factory",
    mostly_slow([asyncio.new_event_loop, uvloop.new_event_loop], but=[uvloop.new_event_loop]),
)
@pytest.mark.parametrize("depth", mostly_slow([1, 2], but=[2]))
def test_what_happened_in_real_time_comes_out_again(
    depth: int, loop_factory: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    record(path, pipeline_depth=depth, loop_factory=loop_factory, seconds=0.3)
    result = replay(DecisionLog(path))
    assert result.divergence is None
    assert result.num_steps > 50


class HostileScheduler(BaseScheduler):
    """Calls the verbs at random; the same ones every time it is built."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.random = random.Random(0)

    def schedule(self) -> SchedulerOutput:
        step = self.new_step(self.random.choice([1, 3, 17, None]))
        for _ in range(self.random.randint(1, 30)):
            anybody = [*self.running, *self.waiting]
            if anybody:
                request = self.random.choice(anybody)
                verb = self.random.choice(
                    [step.run, step.run, step.admit, step.admit, step.preempt]
                )
                verb(request)
        return step.output()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", mostly_slow(range(8), but=range(3)))
def test_whatever_a_policy_does_comes_out_again(seed: int, depth: int) -> None:
    rng, log = random.Random(seed), MemoryLog()
    harness = SchedulerHarness(HostileScheduler, num_blocks=24, pipeline_depth=depth)
    harness.scheduler = RecordingScheduler(
        HostileScheduler,
        harness.config,
        harness.kv_cache,
        max_model_len=harness.max_model_len,
        clock=lambda: harness.now,
        sink=log,
    )
    for number in range(20):
        prompt = [rng.randrange(3)] * rng.randint(1, 40)
        harness.add_request(f"r{number}", prompt, max_tokens=rng.randint(1, 20))
        for _ in range(rng.randrange(4)):
            harness.step()
        if rng.random() < 0.2:
            harness.finish(f"r{rng.randint(0, number)}")
    harness.run_until_idle()
    assert replay(log, HostileScheduler).divergence is None  # type: ignore[arg-type]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", [RaisesMidway, RaisesInUpdate, ReturnsAnOldStep])
def test_failures_of_a_policy_come_out_again(
    policy: type[BaseScheduler], depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "load_policy", lambda spec: policy)
    path = tmp_path / "log"

    async def main() -> None:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        async with AsyncEngine(make_config(path, pipeline_depth=depth)) as engine:
            for first in (1, BAD, 2):
                stream = await engine.add_request([first] * 20, params)
                # The message has the policy's name, not the recorder's.
                fails = pytest.raises(RequestFailedError, match=policy.__name__)
                is_planned = policy is not ReturnsAnOldStep  # by which no request was touched
                with fails if first == BAD and is_planned else nullcontext():
                    async for _ in stream:
                        pass

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        runner.run(main())
    log = DecisionLog(path)
    assert any(isinstance(item, Discarded) or getattr(item, "error", None) for item in log)
    assert replay(log, policy).divergence is None


def test_a_switch_of_the_policy_comes_out_again(tmp_path: Path) -> None:
    path = tmp_path / "log"

    async def main() -> None:
        async with AsyncEngine(make_config(path, policy="chunked_prefill")) as engine:
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            streams = [await engine.add_request([i + 3] * 90, params) for i in range(10)]
            await asyncio.sleep(0.1)
            engine.switch_policy("priority")
            for stream in streams:
                async for _ in stream:
                    pass

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        runner.run(main())
    log = DecisionLog(path)
    assert sum(isinstance(item, Switched) for item in log) == 1
    assert replay(log).divergence is None


class Reversed(FCFSScheduler):
    """As fcfs, but for requests of one user it is last come, first served."""

    def order(self, request: Request) -> float:
        return -request.arrival_time if request.user == "u1" else request.arrival_time


def test_a_changed_order_is_found_at_its_first_step_and_described(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record(path, policy="fcfs")
    divergence = replay(DecisionLog(path), Reversed).divergence
    assert divergence is not None
    assert isinstance(divergence.record, Planned)
    assert isinstance(divergence.replayed, Planned)
    assert divergence.step_id == divergence.record.step_id > 1
    assert divergence.record.new != divergence.replayed.new  # who is let in
    text = "\n".join([*divergence.differences, *divergence.state])
    assert "blocks of r" in text
    assert "batch order: recorded [" in text
    assert "WAITING" in text
    assert "of 24 in use" in text


class CountsTo(ChunkedPrefillScheduler):
    """Chunked prefill that forgets its last runner in step 30."""

    def schedule(self) -> SchedulerOutput:
        if self.num_steps + 1 != 30:
            return super().schedule()
        step = self.new_step()
        for request in self.running[:-1]:
            step.run(request)
        return step.output()


def test_the_step_that_differs_is_the_one_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record(path, policy="chunked_prefill")
    divergence = replay(DecisionLog(path), CountsTo).divergence
    assert divergence is not None
    assert divergence.step_id == 30


class ReadsTheClock(ChunkedPrefillScheduler):
    """Reads the clock more than once in a call, and goes by it."""

    def schedule(self) -> SchedulerOutput:
        self.options.chunk_size = 64 + int(1e6 * self.clock()) % 64 + int(1e6 * self.clock()) % 64
        return super().schedule()


def test_a_policy_that_reads_the_clock_reads_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "load_policy", lambda spec: ReadsTheClock)
    path = tmp_path / "log"
    record(path, loop_factory=asyncio.new_event_loop, seconds=0.5)
    assert replay(DecisionLog(path), ReadsTheClock).divergence is None
    assert replay(DecisionLog(path), ChunkedPrefillScheduler).divergence is not None


def test_the_command_says_identical_or_where_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    record(path, policy="chunked_prefill")
    assert command(["replay", str(path)]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.endswith("requests, identical")
    assert json.loads(last)["identical"] is True
    monkeypatch.setattr("aioserve.lab.decision_log.replay.load_policy", lambda spec: CountsTo)
    assert command(["replay", str(path)]) == 1
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "chunked_prefill: today's code diverges in step 30"
    assert json.loads(last)["identical"] is False
