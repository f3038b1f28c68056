"""A decision log as a Chrome trace: open it in Perfetto (ui.perfetto.dev) or chrome://tracing.

Tracks for steps, scheduling, requests, queue, KV blocks and loop lag. Why requests waited is not in
the log: the scheduler is replayed to ask it. Knows the trace event format; knows no viewer.
"""

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from heapq import heappop, heappush
from typing import Any, BinaryIO

import msgspec

from aioserve.errors import AioserveError
from aioserve.lab.decision_log.reader import Chronicle, DecisionLog, Life, StepLife
from aioserve.lab.decision_log.records import (
    AnyRecord,
    Discarded,
    Planned,
    Reset,
    Switched,
    Updated,
)
from aioserve.lab.decision_log.replay import Replay, agree
from aioserve.request import WaitReason

ENGINE, REQUESTS = 1, 2  # the two groups of tracks, "processes" to a viewer
STEPS, SCHEDULER = 1, 2  # tracks of the engine

Event = dict[str, Any]


def write_trace(log: DecisionLog, file: BinaryIO, *, with_reasons: bool = True) -> int:
    """Write the trace as JSON; returns the number of events. Raises `ConfigError` for a bad log."""
    encoder = msgspec.json.Encoder()
    count = 0
    began = datetime.fromtimestamp(log.header.unix_time, UTC)
    chronicle = Chronicle(log.header)
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for event in trace_events(log, chronicle, with_reasons=with_reasons):
        file.write(b",\n" if count else b"\n")
        file.write(encoder.encode(event))
        count += 1
    about = {
        "aioserve": log.header.version,
        "policy": chronicle.policies,
        "began": began.isoformat(timespec="seconds"),
    }
    file.write(b'\n],"otherData":%b}\n' % encoder.encode(about))
    return count


def trace_events(
    log: DecisionLog, chronicle: Chronicle, *, with_reasons: bool = True
) -> Iterator[Event]:
    """Yield the events; requests come last, because their tracks are shared out once all are known.

    `chronicle`, a new one, is told the whole log on the way.
    """
    counters = _Counters()
    reasons = _Reasons(log) if with_reasons else None
    yield from _names(ENGINE, "engine", {STEPS: "steps", SCHEDULER: "scheduler"})
    for record in log:
        if reasons is not None:
            reasons.feed(record)
        step = chronicle.feed(record)
        if step is not None:
            yield _step_event(step)
        yield from _scheduler_events(record, chronicle)
        if isinstance(record, Planned) and record.error is None:
            yield from counters.changes(record, chronicle.now)
            if reasons is not None:
                reasons.note(chronicle)
    for life in chronicle.lives:
        if life.end is None:
            life.end = chronicle.now
    yield from _request_events(chronicle.lives, reasons.changes if reasons else {})
    if reasons is not None and reasons.lost_at is not None:
        yield _instant(
            "today's scheduler decides differently: no wait reasons from here on",
            max(reasons.lost_at, 0.0),
            ENGINE,
            SCHEDULER,
        )


class _Reasons:
    """The reasons why requests wait, from a replay, for as long as it does what was recorded."""

    def __init__(self, log: DecisionLog) -> None:
        self.changes: dict[int, list[tuple[float, WaitReason]]] = {}  # by `id` of a life
        self.lost_at: float | None = None
        self._began = log.header.time
        self._last: dict[str, WaitReason] = {}
        self._replay: Replay | None = None
        try:
            self._replay = Replay(log.header)
        except AioserveError:  # the policy is not here
            self.lost_at = 0.0

    def feed(self, record: AnyRecord) -> None:
        if self._replay is not None and not agree(record, self._replay.feed(record)):
            self._replay = None
            self.lost_at = record.time - self._began

    def note(self, chronicle: Chronicle) -> None:
        """Note the reasons after a step: only those that have changed."""
        if self._replay is None:
            return
        reasons = self._replay.scheduler.get_wait_reasons()
        for request_id, reason in reasons.items():
            if self._last.get(request_id) != reason and request_id in chronicle.active:
                life = chronicle.active[request_id]
                self.changes.setdefault(id(life), []).append((chronicle.now, reason))
        self._last = reasons


class _Counters:
    """Queue, batch, KV blocks and loop lag, when they change."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def changes(self, planned: Planned, now: float) -> Iterator[Event]:
        values = {
            "waiting": planned.num_waiting,
            "running": planned.num_running,
            "KV blocks": planned.num_used_blocks,
            "loop lag ms": round(1e3 * planned.lag, 3),
        }
        for name, value in values.items():
            if self._last.get(name) != value:
                self._last[name] = value
                yield {
                    "ph": "C",
                    "name": name,
                    "ts": _us(now),
                    "pid": ENGINE,
                    "tid": 0,
                    "args": {name: value},
                }


def _step_event(step: StepLife) -> Event:
    features = step.features
    args = {
        "step": step.step_id,
        "prefill tokens": features.num_prefill_tokens,
        "decodes": features.num_decodes,
        "context tokens": features.num_context_tokens,
    }
    name = "mixed" if features.num_prefill_tokens and features.num_decodes else "decode"
    name = name if features.num_decodes else "prefill"
    return _slice(name, step.began, step.ended, ENGINE, STEPS, args)


def _scheduler_events(record: AnyRecord, chronicle: Chronicle) -> Iterator[Event]:
    now = chronicle.now
    match record:
        case Planned() | Updated():
            name = "schedule" if isinstance(record, Planned) else "update"
            args = {"step": record.step_id} | ({"error": record.error} if record.error else {})
            yield _slice(name, now, now + record.took, ENGINE, SCHEDULER, args)
            if record.error is not None:
                yield _instant(record.error, now, ENGINE, SCHEDULER)
        case Discarded():
            yield _instant("step discarded", now, ENGINE, SCHEDULER)
        case Reset():
            yield _instant("prefix cache reset", now, ENGINE, SCHEDULER)
        case Switched(error=None):
            yield _instant(f"policy {record.scheduler['policy']}", now, ENGINE, SCHEDULER)
        case Switched():
            name = f"switch to {record.scheduler['policy']} refused: {record.error}"
            yield _instant(name, now, ENGINE, SCHEDULER)


def _request_events(
    lives: list[Life], reasons: dict[int, list[tuple[float, WaitReason]]]
) -> Iterator[Event]:
    """Yield a slice per request with its phases within; as few lanes as keep them apart."""
    free: list[tuple[float, int]] = []  # when, and which lane
    num_lanes = 0
    for life in sorted(lives, key=lambda life: life.arrival):
        assert life.end is not None
        if free and free[0][0] <= life.arrival:
            _, lane = heappop(free)
        else:
            num_lanes += 1
            lane = num_lanes
        heappush(free, (life.end, lane))
        yield from _life_events(life, lane)
        for time, reason in reasons.get(id(life), ()):
            yield _instant(f"waits: {reason.value}", time, REQUESTS, lane)
    lanes = {lane: f"lane {lane}" for lane in range(1, num_lanes + 1)}
    yield from _names(REQUESTS, "requests", lanes)


def _life_events(life: Life, lane: int) -> Iterator[Event]:
    assert life.end is not None
    args = {
        "prompt tokens": life.num_prompt_tokens,
        "cached tokens": life.num_cached_tokens,
        "output tokens": len(life.tokens),
        "preemptions": life.num_preemptions,
        "priority": life.spec.priority,
        "user": life.spec.user,
        "finish reason": life.finish_reason or "not finished",
    }
    yield _slice(life.request_id, life.arrival, life.end, REQUESTS, lane, args)
    ends = [*(begin for begin, _ in life.phases[1:]), life.end]
    for (begin, phase), end in zip(life.phases, ends, strict=True):
        yield _slice(phase, begin, end, REQUESTS, lane, {})


def _names(pid: int, name: str, tracks: dict[int, str]) -> Iterable[Event]:
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    for tid, track in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid,
               "args": {"sort_index": tid}}  # fmt: skip


def _slice(name: str, begin: float, end: float, pid: int, tid: int, args: Event) -> Event:
    begin_us = _us(begin)
    return {
        "ph": "X",
        "name": name,
        "ts": begin_us,
        "dur": round(max(_us(end) - begin_us, 0.0), 3),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _instant(name: str, time: float, pid: int, tid: int) -> Event:
    return {"ph": "i", "s": "t", "name": name, "ts": _us(time), "pid": pid, "tid": tid}


def _us(seconds: float) -> float:
    """Return seconds as microseconds, rounded to the nanosecond."""
    return round(1e6 * seconds, 3)
