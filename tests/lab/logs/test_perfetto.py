"""A trace is valid in Chrome's trace event format, and says what the log says."""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from aioserve.cli.main import main as command
from aioserve.lab import VirtualClockEventLoop
from aioserve.lab.decision_log.reader import Chronicle, DecisionLog
from aioserve.lab.logs import trace_events
from tests.lab.traffic import record

Event = dict[str, Any]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> DecisionLog:
    path = tmp_path_factory.mktemp("trace") / "log"
    record(path, policy="chunked_prefill", pipeline_depth=2)
    return DecisionLog(path)


@pytest.fixture(scope="module")
def events(log: DecisionLog, tmp_path_factory: pytest.TempPathFactory) -> list[Event]:
    path = tmp_path_factory.mktemp("out") / "trace.json"
    assert command(["trace", str(log.path), "-o", str(path)]) == 0
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def slices(events: list[Event], process: str) -> dict[int, list[Event]]:
    """By track."""
    (pid,) = (
        e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process
    )
    tracks: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == pid:
            tracks[event["tid"]].append(event)
    return tracks


def test_every_event_has_what_the_format_asks_for(events: list[Event]) -> None:
    for event in events:
        assert event["ph"] in "XCiM"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "i":
            assert event["s"] == "t"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] in "Xi"} <= named


def test_slices_of_a_track_are_apart_or_nested(events: list[Event]) -> None:
    for process in ("engine", "requests"):
        for track in slices(events, process).values():
            open_until: list[float] = []
            for event in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
                end = event["ts"] + event["dur"]
                while open_until and open_until[-1] <= event["ts"] + 0.01:
                    open_until.pop()
                assert not open_until or end <= open_until[-1] + 0.01
                open_until.append(end)


@pytest.mark.parametrize("loop_factory", [VirtualClockEventLoop, uvloop.new_event_loop])
def test_nothing_begins_before_its_request_or_ends_after_it(
    loop_factory: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    record(path, loop_factory=loop_factory, num_requests=60, seconds=1.0)
    log = DecisionLog(path)
    events = list(trace_events(log, Chronicle(log.header)))
    num_phases = 0
    for track in slices(events, "requests").values():
        # In the file a request comes first, and its phases after it, one where the last one ended.
        begin = end = last = 0.0
        for event in track:
            if "finish reason" in event["args"]:
                begin = last = event["ts"]
                end = begin + event["dur"]
                continue
            num_phases += 1
            assert event["ts"] == pytest.approx(last, abs=0.002)
            assert begin <= event["ts"]
            last = event["ts"] + event["dur"]
            assert last <= end + 0.002
    assert num_phases > 100


def test_steps_and_requests_are_those_of_the_log(log: DecisionLog, events: list[Event]) -> None:
    chronicle = Chronicle(log.header)
    num_back = sum(chronicle.feed(item) is not None for item in log)
    steps = slices(events, "engine")[1]
    assert len(steps) == num_back
    assert {event["name"] for event in steps} == {"prefill", "decode", "mixed"}
    names = Counter(e["name"] for track in slices(events, "requests").values() for e in track)
    phases = Counter(phase for life in chronicle.lives for _, phase in life.phases)
    assert phases["preempted"] > 0
    for phase, count in phases.items():
        assert names.pop(phase) == count
    assert names == Counter(life.request_id for life in chronicle.lives)


def test_counters_and_reasons_are_there_and_only_changes(events: list[Event]) -> None:
    last: dict[str, float] = {}
    for event in events:
        if event["ph"] == "C":
            assert last.get(event["name"]) != event["args"][event["name"]]
            last[event["name"]] = event["args"][event["name"]]
    assert last.keys() == {"waiting", "running", "KV blocks", "loop lag ms"}
    assert last["waiting"] == 0
    reasons = Counter(e["name"] for e in events if e["name"].startswith("waits: "))
    assert reasons.keys() >= {"waits: blocks", "waits: policy"}


def test_a_switch_is_drawn_and_a_refused_one_is_called_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    switches: list[tuple[float, str, dict[str, Any]]] = [
        (0.1, "priority", {"no_such": 1}),
        (0.2, "hrrn", {}),
    ]
    record(path, num_requests=30, policy="fcfs", switches=switches)
    out = tmp_path / "trace.json"
    assert command(["trace", str(path), "-o", str(out)]) == 0
    trace = json.loads(out.read_text())
    instants = [e for e in trace["traceEvents"] if e["ph"] == "i" and e["pid"] == 1]
    drawn = [e["name"] for e in instants if "policy" in e["name"]]
    assert drawn[1:] == ["policy hrrn"]
    assert drawn[0].startswith("switch to priority refused: ConfigError: options of policy")
    assert trace["otherData"]["policy"] == "fcfs, then hrrn from 0.2 s"


def test_without_the_policy_there_is_a_trace_without_reasons(
    log: DecisionLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(spec: str) -> None:
        from aioserve.errors import UnknownPolicyError

        raise UnknownPolicyError(spec)

    monkeypatch.setattr("aioserve.lab.decision_log.replay.load_policy", unknown)
    path = tmp_path / "trace.json"
    assert command(["trace", str(log.path), "-o", str(path)]) == 0
    text = path.read_text()
    assert "waits: " not in text
    assert "no wait reasons from here on" in text
