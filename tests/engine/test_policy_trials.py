"""A trial of another policy on live traffic: what is recorded, what is refused, what is left."""

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aioserve import AsyncEngine, EngineConfig, EngineSnapshot, SamplingParams
from aioserve.config import RunnerConfig, SchedulerConfig
from aioserve.engine.operations import FindReport, TryPolicy
from aioserve.engine.operations.commands import Report
from aioserve.errors import AioserveError, ConfigError, EngineOverloadedError, RequestError
from aioserve.lab.comparison.bootstrap import MIN_BLOCKS
from aioserve.lab.comparison.measures import REQUESTS_PER_BLOCK
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import replay
from aioserve.lab.policy_trials import ENOUGH_REQUESTS
from aioserve.lab.what_if import make_workload, read_traffic
from tests.processes import PATIENCE

CONFIG = EngineConfig(
    runner=RunnerConfig(runner="simulated", step_base_ms=2, step_decode_us=1),
    scheduler=SchedulerConfig(policy="chunked_prefill", options={"chunk_size": 64}),
)


def look(engine: AsyncEngine) -> EngineSnapshot:
    snapshot = engine.inspect()
    assert snapshot is not None
    return snapshot


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of other processes are none of these."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("aioserve-trial-*"))


async def generate(engine: AsyncEngine, length: int, num_tokens: int) -> None:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    async for _ in engine.generate([3] * length, params):
        pass


@asynccontextmanager
async def busy() -> AsyncIterator[AsyncEngine]:
    """Some requests are there for long, others come and go."""

    async def come_and_go() -> None:
        while True:
            await asyncio.gather(*(generate(engine, 100, 20) for _ in range(3)))

    async with AsyncEngine(CONFIG) as engine:
        tasks = [asyncio.create_task(generate(engine, 50, 3000)) for _ in range(4)]
        tasks.append(asyncio.create_task(come_and_go()))
        while sum(bool(r.num_output_tokens) for r in look(engine).requests) < 7:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        try:
            yield engine
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until_recording(engine: AsyncEngine) -> None:
    async with asyncio.timeout(PATIENCE):
        while look(engine).watchers != ["RecordingScheduler"]:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_log_that_begins_amid_traffic_tells_of_what_came_and_what_steps_took(
    tmp_path: Path,
) -> None:
    async with busy() as engine:
        num_there = len(look(engine).requests)
        asked = asyncio.create_task(engine.ask(TryPolicy("fcfs", {}, 60, 30)))
        while not (folder := sorted(folders())):  # noqa: ASYNC110
            await asyncio.sleep(0)
        while not list(folder[0].glob("*.yaml")):  # noqa: ASYNC110 - written after the recording
            await asyncio.sleep(0.001)
        shutil.copy(folder[0] / "recording", tmp_path / "log")
        report = await asked
    log = DecisionLog(tmp_path / "log")
    assert log.header.num_there == num_there >= 4
    traffic = read_traffic(log)
    assert len(traffic.lives) == report.num_requests >= 30
    assert all(life.arrival >= 0 for life in traffic.lives)
    assert {life.num_prompt_tokens for life in traffic.lives} == {100}
    ended = [life for life in traffic.lives if life.end is not None]
    assert ended
    assert all(len(life.tokens) == 20 for life in ended)
    assert len(make_workload(traffic, "log").requests) == report.num_requests
    long = [
        life for life in traffic.chronicle.lives if life.spec.sampling_params.max_tokens == 3000
    ]
    assert len(long) == 4
    assert all(life.num_computed > life.num_prompt_tokens > 50 for life in long)
    with pytest.raises(ConfigError, match=f"begins with {num_there} requests that were there"):
        replay(log)


async def test_both_policies_are_simulated_and_nothing_is_left_behind() -> None:
    before = folders()
    async with busy() as engine:
        asked = asyncio.create_task(engine.ask(TryPolicy("fcfs", {}, 60, 30)))
        await until_recording(engine)
        with pytest.raises(EngineOverloadedError, match="another trial goes on"):
            await engine.ask(TryPolicy("hrrn", {}, 2))
        report = await asked
        assert look(engine).watchers == []
        assert report.num_requests > 0
        assert "chunked_prefill" in report.words
        assert "fcfs" in report.words
        count = report.num_requests
        assert report.on_these_requests[0].startswith(f"On these {count} requests, fcfs against ")
        assert not report.has_intervals  # of so few
        html = await engine.ask(FindReport(report.report_id))
        assert html is not None
        assert html.startswith(b"<!doctype html>")
        assert await engine.ask(FindReport("another")) is None
    assert folders() <= before


@pytest.mark.slow
async def test_where_nothing_is_said_it_records_until_there_is_a_verdict() -> None:
    async with busy() as engine:
        report = await engine.ask(TryPolicy("fcfs", {}, None))
    assert report.num_requests >= 200
    assert report.num_missing == 0
    rows = [line for line in report.words.splitlines() if re.match(r"TTFT \w+, ms ", line)]
    assert rows
    has_intervals = all(" .. " in row for row in rows)
    assert report.has_intervals == has_intervals
    assert has_intervals != ("fewer than 10 independent stretches" in report.words)
    assert "requests more" not in report.words


@pytest.fixture(scope="module")
def short() -> Report:
    """A trial that ends with 20 requests, and not after 200 s."""

    async def record() -> Report:
        async with busy() as engine:
            return await engine.ask(TryPolicy("fcfs", {}, 200, 20))

    return asyncio.run(record())


def test_of_few_requests_it_is_said_how_many_are_missing(short: Report) -> None:
    report = short
    assert 20 <= report.num_requests < 200
    assert report.num_missing == 200 - report.num_requests
    assert f"a recorded trace needs {report.num_missing} requests more" in report.words
    assert not any(" .. " in line for line in report.words.splitlines() if "TTFT" in line)


def test_what_was_measured_stands_beside_the_simulation_of_the_live_policy(
    short: Report,
) -> None:
    report = short
    lines = [line for line in report.words.splitlines() if line]
    assert lines[2].startswith(f"On these {report.num_requests} requests, fcfs against chunked_")
    assert lines[3] == "That is exact in the simulation; an interval is about other requests."
    head, *rows = lines[4:]
    assert head.split()[:3] == ["recorded", "chunked_prefill", "fcfs"]
    ttft = next(row for row in rows if row.startswith("TTFT p50"))
    assert float(ttft.split()[3]) > 0
    assert "Simulated, chunked_prefill is off by: TTFT mean" in report.words


def test_enough_requests_are_the_blocks_that_intervals_are_drawn_from() -> None:
    assert ENOUGH_REQUESTS == MIN_BLOCKS * REQUESTS_PER_BLOCK


@pytest.mark.parametrize(
    ("policy", "options", "seconds", "error", "words"),
    [
        ("fcsf", {}, 2, ConfigError, "did you mean 'fcfs'"),
        ("chunked_prefill", {"chunk": 5}, 2, ConfigError, "chunk_size"),
        ("fcfs", {}, 0.5, RequestError, "seconds must be from 1 to 300"),
        ("fcfs", {}, 1e9, RequestError, "seconds must be from 1 to 300"),
        ("fcfs", {}, 1, RequestError, "no request came in 1 s"),
    ],
)
async def test_what_cannot_be_tried_is_refused_in_words(
    policy: str, options: dict[str, Any], seconds: float, error: type[AioserveError], words: str
) -> None:
    async with AsyncEngine(CONFIG) as engine:
        with pytest.raises(error, match=words):
            await engine.ask(TryPolicy(policy, options, seconds))


async def test_blocks_are_not_taken_while_a_trial_records() -> None:
    async with busy() as engine:
        asked = asyncio.create_task(engine.ask(TryPolicy("fcfs", {}, 60)))
        await until_recording(engine)
        with pytest.raises(ConfigError, match="recorded to try a policy on"):
            await engine.sleep()
        assert engine.state == "running"
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await engine.sleep()
        await engine.wake()


async def test_who_leaves_ends_the_recording() -> None:
    async with busy() as engine:
        asked = asyncio.create_task(engine.ask(TryPolicy("fcfs", {}, 60)))
        await until_recording(engine)
        asked.cancel()
        await asyncio.wait([asked])
        assert look(engine).watchers == []
        with pytest.raises(RequestError, match="seconds must be"):  # and another may begin
            await engine.ask(TryPolicy("fcfs", {}, 0))
