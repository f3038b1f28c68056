"""The commands that read a decision log: `replay` and `trace`.

Arguments in, words out. Exit code 0: it agrees; 1: it does not; 2 (by the caller, for a
`ConfigError`): the log or a setting cannot be used.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from heapq import heappop, heappush
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from aioserve.config import EngineConfig
from aioserve.errors import AioserveError, ConfigError
from aioserve.lab.arguments import (
    add_card,
    add_json,
    add_output,
    add_settings,
    read_card,
    refuse_card,
    wants_json,
)
from aioserve.lab.decision_log.reader import Chronicle, DecisionLog, Life, StepLife
from aioserve.lab.decision_log.records import (
    AnyRecord,
    Discarded,
    Planned,
    Reset,
    Switched,
    Updated,
)
from aioserve.lab.decision_log.replay import Divergence, Replay, agree, replay
from aioserve.lab.terminal import legend
from aioserve.lab.what_if import Measures, WhatIf, what_if
from aioserve.request import WaitReason
from aioserve.runner.step_times import machine_in_words, step_times
from aioserve.support.arguments import Parser

# What a policy is chosen by: of these the error of the simulation is said.
CHECKED = ("TTFT mean ms", "TTFT p99 ms", "gap p99 ms", "e2e mean ms", "e2e p99 ms", "tokens/s")
TRUSTED_ERROR = 0.15


def run_replay(argv: Sequence[str]) -> int:
    """`python -m aioserve replay FILE [--policy P] [--set ...]`; returns the exit code.

    Raises `ConfigError`.
    """
    parser = Parser(
        "replay",
        description="Check that today's code decides as recorded, step by step. With --policy, "
        "--set or --card: what another policy, or the recorded one on another machine, would have "
        "done with the same traffic, in virtual time.",
        epilog="Where stdout is no terminal, the last line is JSON. Exit code 1: some step came "
        "out differently.",
    )
    parser.add_argument(
        "log", metavar="FILE", help="decision log, written by a server with --decision-log"
    )
    parser.add_argument("--policy", help="policy to simulate on the recorded traffic, as for serve")
    add_settings(
        parser, "change a scheduler or cache setting, or scheduler.options.NAME; repeatable"
    )
    add_card(parser)
    add_json(parser)
    args = parser.parse_args(argv)
    card = read_card(args)
    log = DecisionLog(args.log)
    if args.policy is None and not args.set and not card:
        exit_code, document = _check(log)
    else:
        exit_code, document = _compare(log, args.policy, args.set, card)
    if wants_json(args):
        print(json.dumps(document))
    return exit_code


def run_trace(argv: Sequence[str]) -> int:
    """`python -m aioserve trace FILE [-o OUT]`; returns the exit code. Raises `ConfigError`."""
    refuse_card(argv, "trace shows a log as it was written; `replay --card` simulates another one")
    parser = Parser(
        "trace",
        description="Turn a decision log into a trace for ui.perfetto.dev or chrome://tracing.",
    )
    parser.add_argument(
        "log", metavar="FILE", help="decision log, written by a server with --decision-log"
    )
    add_output(parser, "-o", "--output", help="file to write the trace to (default: FILE.json)")
    parser.add_argument(
        "--no-reasons",
        action="store_true",
        help="leave out why requests waited: faster, as the scheduler is not run again",
    )
    args = parser.parse_args(argv)
    log = DecisionLog(args.log)
    path = Path(args.output or f"{args.log}.json")
    try:
        with path.open("wb") as file:
            num_events = write_trace(log, file, with_reasons=not args.no_reasons)
    except OSError as error:
        raise ConfigError(f"cannot write trace {path}: {error.strerror}") from error
    print(f"{path}: {num_events} events; open it in https://ui.perfetto.dev")
    _say_if_cut(log)
    return 0


def _check(log: DecisionLog) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and what was found as data."""
    result = replay(log)
    if result.divergence is not None:
        print(f"{result.policies}: today's code diverges {_where(result.divergence)}")
        for title, lines in (
            ("What differs", result.divergence.differences),
            ("Just before", result.divergence.state),
        ):
            print(f"{title}:")
            for line in lines:
                print(f"  {line}")
    else:
        counts = f"{result.num_steps} steps, {result.num_requests} requests"
        print(f"{result.policies}: {counts}, identical")
        _say_if_cut(log)
    document = {
        "identical": result.divergence is None,
        "steps": result.num_steps,
        "requests": result.num_requests,
        "complete": log.is_complete,
    }
    return (0 if result.divergence is None else 1), document


def _where(divergence: Divergence) -> str:
    kind = type(divergence.record).__name__
    if kind == "Planned":
        return f"in step {divergence.step_id}"
    return f"after step {divergence.step_id}, in a record {kind!r}"


def _say_if_cut(log: DecisionLog) -> None:
    if not log.is_complete:
        print("The log has no end: its server still runs, or died.")


def _compare(
    log: DecisionLog,
    policy: str | None,
    settings: list[tuple[str, str]],
    card: Sequence[tuple[str, Any]],
) -> tuple[int, dict[str, Any]]:
    """Print what the traffic measures under `policy` and `settings`, on the machine that the
    settings of a `card` name; exit code and JSON.
    """
    runner = EngineConfig.load(None, card).runner
    machine = step_times(runner) if card else None
    result = what_if(log, policy, settings, machine)
    name = policy or result.policies
    if settings:
        name += f" with {', '.join(f'{n}={v}' for n, v in settings)}"
    if machine is not None:
        name += f" on {machine.machine or runner.profile}"
    header = ("", "recorded", "simulated", "what if")
    print("{:22}{:>14}{:>14}{:>14}".format(*header))
    for measure, real in result.recorded.items():
        same = "-" if result.same is None else f"{result.same[measure]:.6g}"
        print(f"{_label(measure):22}{real:14.6g}{same:>14}{result.other[measure]:14.6g}")
    print(legend([_label(measure) for measure in result.recorded]))
    print(f"recorded, simulated: {result.policies}; what if: {name}")
    print(f"step times: {result.step_time.error}")
    if card:
        print(f"what if: {machine_in_words(runner)}")
    errors = _errors(result)
    if result.same is None:
        print(
            f"{result.policies} is the scheduler of another engine, which is not installed here: "
            "it is not simulated, and how far the simulation is from reality is not known"
        )
    if result.same is not None:
        print(f"On these requests, {name} against {result.policies}, both simulated: ", end="")
        print(f"{_listed(_ratios(result.other, result.same))}.")
    if errors:
        print(f"simulation against reality: {_listed(errors)}")
    if any(abs(error) > TRUSTED_ERROR for error in errors.values()):
        print(
            "The simulation is off by more than 15%: compare the simulated columns with each other "
            "only. Steps of equal size took very different times; was the machine shared?"
        )
    if result.num_refused:
        print(f"{result.num_refused} requests that were refused are left out of the simulations")
    _say_if_cut(log)
    return 0, _as_json(result, name)


def _label(measure: str) -> str:
    """Return the label of a row for people: JSON has it shorter."""
    return measure.replace("e2e", "end to end")


def _errors(result: WhatIf) -> dict[str, float]:
    """Return the errors of the simulation of what was recorded, relative to what was recorded."""
    return {} if result.same is None else _ratios(result.same, result.recorded)


def _ratios(values: Measures, others: Measures) -> dict[str, float]:
    """Return the changes of what is checked from `others` to `values`, as shares of `others`."""
    return {name: values[name] / others[name] - 1 for name in CHECKED if others[name]}


def _listed(changes: dict[str, float]) -> str:
    return ", ".join(f"{_label(measure)} {change:+.1%}" for measure, change in changes.items())


def _as_json(result: WhatIf, name: str) -> dict[str, Any]:
    return {
        "policies": {"recorded": result.policies, "what_if": name},
        "recorded": result.recorded,
        "simulated": result.same,
        "what_if": result.other,
        "errors": _errors(result),
        "step_time": msgspec.to_builtins(result.step_time),
        "refused_left_out": result.num_refused,
    }


# A decision log as a Chrome trace: steps, scheduling, requests, queue, KV blocks and loop lag. Why
# requests waited is not in the log: the scheduler is replayed to ask it.


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
