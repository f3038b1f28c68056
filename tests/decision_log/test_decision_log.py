"""The file: compact, readable after any accident, and never in the way of the server."""

import asyncio
import itertools
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from aioserve import AsyncEngine, SamplingParams
from aioserve.cli.main import main as command
from aioserve.errors import ConfigError
from aioserve.lab import VirtualClockEventLoop
from aioserve.lab.decision_log.reader import Chronicle, DecisionLog
from aioserve.lab.decision_log.recorder import FRAME_BYTES, LogWriter
from aioserve.lab.decision_log.records import Added, Closed, Discarded, Planned, Updated
from aioserve.lab.decision_log.replay import replay
from aioserve.request import RequestSpec
from tests.lab.traffic import make_config, record, serve
from tests.processes import PATIENCE


async def serve_one(engine: AsyncEngine) -> int:
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    return sum([len(o.token_ids) async for o in engine.generate([5] * 20, params)])


def test_without_the_setting_nothing_stands_before_the_scheduler() -> None:
    async def main() -> None:
        async with AsyncEngine(make_config(None, policy="chunked_prefill")) as engine:
            snapshot = engine.inspect()
            assert snapshot is not None
            assert snapshot.watchers == []

    asyncio.run(main())


def test_nobody_notices_that_a_log_is_written(tmp_path: Path) -> None:
    async def main(path: Path | None) -> list[tuple[float, int, list[int]]]:
        async with AsyncEngine(make_config(path, pipeline_depth=2)) as engine:
            return await serve(engine, 0, 80, 0.8)

    received = []
    for path in (None, tmp_path / "log"):
        with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
            received.append(runner.run(main(path)))
    assert received[0] == received[1]
    assert len(received[0]) > 300


def test_the_log_tells_what_happened(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record(path, policy="fcfs")
    log = DecisionLog(path)
    chronicle, steps = Chronicle(log.header), []
    for item in log:
        if (step := chronicle.feed(item)) is not None:
            steps.append(step)
    assert not chronicle.active
    for life in chronicle.lives:
        assert len(life.tokens) == len(life.token_times)
        assert life.end is not None
        assert [life.arrival, *life.token_times, life.end] == sorted(
            [life.arrival, *life.token_times, life.end]
        )
        if life.finish_reason == "length":
            assert life.num_computed == life.num_prompt_tokens + len(life.tokens) - 1
            phases = [phase for _, phase in life.phases]
            assert phases[0] == "queued"
            assert phases[1] == "prefill"
    assert sum(step.num_tokens for step in steps) > 2000
    for earlier, later in pairwise(steps):
        assert earlier.ended <= later.began < later.ended  # no two compute at once


def test_in_steady_decode_a_step_takes_few_bytes(tmp_path: Path) -> None:
    path = tmp_path / "log"

    async def main() -> None:
        async with AsyncEngine(make_config(path)) as engine:
            params = SamplingParams(max_tokens=100, ignore_eos=True)
            streams = [await engine.add_request([i + 3] * 5, params) for i in range(3)]
            for stream in streams:
                async for _ in stream:
                    pass

    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        runner.run(main())
    planned = [item for item in DecisionLog(path) if isinstance(item, Planned)]
    same = [item for item in planned if item.requests is None and item.num_tokens is None]
    assert len(same) > 95
    assert path.stat().st_size < 60 * len(planned)


@pytest.mark.parametrize("cut", [1, 7, 100, 1500])
def test_a_torn_end_is_left_out_and_told(
    cut: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    record(path)
    whole = list(DecisionLog(path))
    path.write_bytes(path.read_bytes()[:-cut])
    log = DecisionLog(path)
    rest = list(log)
    assert rest == whole[: len(rest)]
    assert len(rest) < len(whole)
    assert not log.is_complete
    assert command(["replay", str(path)]) == 0
    assert "no end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "is not a decision log"),
        (lambda data: b"TIMESTAMP,ContextTokens\n1,2\n", "is not a decision log"),
        (lambda data: data.replace(b"log 10\n", b"log 3\n", 1), "has format 3; this"),
        (lambda data: data[:60], "ends before its header"),
        (lambda data: data[:500] + b"x" * 50 + data[550:], "is damaged at byte"),
    ],
)
def test_a_file_that_is_no_log_is_one_line_and_exit_code_2(
    damage: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    record(path, num_requests=20)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    for name in ("replay", "trace"):
        assert command([name, str(path)]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["replay", str(tmp_path / "none")]) == 2
    assert "none: No such file" in capsys.readouterr().err


def test_settings_of_another_version_are_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    record(path, num_requests=1)
    header = DecisionLog(path).header
    header.scheduler["max_num_unicorns"] = 3
    path.unlink()
    writer = LogWriter(path)
    writer.write(header)
    writer.close()
    with pytest.raises(ConfigError, match=r"written by aioserve .*max_num_unicorns"):
        DecisionLog(path)


def test_a_request_that_nobody_would_accept_is_damage(tmp_path: Path) -> None:
    path, params = tmp_path / "log", SamplingParams()
    record(path, num_requests=1)
    header = DecisionLog(path).header
    msgspec.structs.force_setattr(params, "temperature", -1.0)
    writer = LogWriter(path)
    writer.write(header)
    writer.write(Added(header.time, RequestSpec("r", [1], params), None))
    writer.close()
    with pytest.raises(ConfigError, match=r"is damaged at byte .* temperature must be"):
        list(DecisionLog(path))


def test_an_older_log_is_kept_and_nobody_else_can_read_the_prompts(tmp_path: Path) -> None:
    path = tmp_path / "decisions.log"
    sizes = []
    for num_requests in (3, 2, 1):
        record(path, num_requests=num_requests)
        sizes.append(path.stat().st_size)
        assert path.stat().st_mode & 0o077 == 0
    assert (tmp_path / "decisions.1.log").stat().st_size == sizes[0]
    assert (tmp_path / "decisions.2.log").stat().st_size == sizes[1]
    assert len(list(tmp_path.iterdir())) == 3


async def test_a_place_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write decision log .*there is no folder"):
        await AsyncEngine(make_config(tmp_path / "no" / "such" / "log")).start()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a disk that is always full")
def test_a_full_disk_ends_the_log_not_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    path.symlink_to("/dev/full")

    async def main() -> None:
        config = make_config(path)
        engine = AsyncEngine(config)
        await engine.start()
        for _ in range(30):
            assert await serve_one(engine) == 5
        await engine.shutdown()

    asyncio.run(main())
    assert "ends here: OSError" in caplog.text


async def test_what_cannot_be_noted_ends_the_log_not_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    async with AsyncEngine(make_config(path)) as engine:
        assert await serve_one(engine) == 5
        params, bad = SamplingParams(max_tokens=5), object()
        async for _ in engine.generate([1, 2, 3], params, key_name=bad):  # type: ignore[arg-type]
            pass
        assert await serve_one(engine) == 5
    assert "ends here: TypeError" in caplog.text
    assert replay(DecisionLog(path)).divergence is None


def test_an_idle_server_has_written_everything(tmp_path: Path) -> None:
    path = tmp_path / "log"

    async def main() -> Counter[type]:
        async with AsyncEngine(make_config(path)) as engine:
            assert await serve_one(engine) == 5
            async with asyncio.timeout(PATIENCE):
                while not (  # noqa: ASYNC110 - a thread writes it
                    kinds := Counter(map(type, DecisionLog(path)))
                )[Updated]:
                    await asyncio.sleep(0.01)
        return kinds

    kinds = asyncio.run(main())
    assert kinds[Planned] >= kinds[Updated] == 5
    assert Closed not in kinds


def test_the_loop_only_fills_a_buffer(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "log")
    item = Discarded(0.0, 1, ["x" * 1000], None)
    for _ in range(FRAME_BYTES // 1010):
        writer.write(item)
    assert len(writer._buffer) > FRAME_BYTES - 1100  # nothing of it is on its way
    writer.write(item)
    assert not writer._buffer
    writer.close()


async def test_the_lag_of_the_loop_is_recorded_with_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is of a loop that was blocked: tests/engine/test_engine_clock.py."""
    lags = itertools.count(1.5)
    monkeypatch.setattr("aioserve.engine.builder.LoopLag", lambda: lambda: next(lags))
    path = tmp_path / "log"
    async with AsyncEngine(make_config(path)) as engine:
        async for _ in engine.generate([5] * 20, SamplingParams(max_tokens=4, ignore_eos=True)):
            pass
    found = [item.lag for item in DecisionLog(path) if isinstance(item, Planned)]
    assert found == [1.5 + number for number in range(len(found))]
    assert len(found) >= 4
