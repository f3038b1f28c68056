"""Runs a recorded scheduler again, with today's code, and compares every decision.

A replay is a second recording: the same calls at the same times must give the same records. Knows
nothing about engines, runners or tensors.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from aioserve.errors import FROM_OUTSIDE, ConfigError
from aioserve.lab.decision_log.reader import Chronicle, DecisionLog
from aioserve.lab.decision_log.recorder import RecordingScheduler, RecordSink
from aioserve.lab.decision_log.records import (
    Added,
    AnyRecord,
    Closed,
    Discarded,
    Expired,
    Finished,
    Header,
    Name,
    Planned,
    Record,
    Reset,
    Switched,
    Updated,
)
from aioserve.outputs import ModelRunnerOutput
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import BaseScheduler, SchedulerInterface, SchedulerOutput, load_policy

MAX_SHOWN = 10  # lines of one kind, and requests in a line

MakeScheduler = Callable[..., SchedulerInterface]


class Divergence(NamedTuple):
    """The place where today's code first did something else."""

    step_id: int  # the step that differs, or the last one planned before
    record: AnyRecord
    replayed: Record
    differences: list[str]
    state: list[str]  # of today's scheduler, just before


class ReplayResult(NamedTuple):
    """The result of a replay; `divergence` is None if all agrees."""

    num_steps: int
    num_requests: int
    policies: str  # that were replayed, in words
    divergence: Divergence | None


class Replay:
    """Today's scheduler, fed with recorded calls. `clock` is what was recorded."""

    def __init__(self, header: Header, make_scheduler: MakeScheduler | None = None) -> None:
        """`make_scheduler` replaces the policy that the header names. Raises `ConfigError`."""
        header.check_is_whole()
        self._now = header.time
        self._sink = _ListSink()
        self._ids: list[str] = []  # of requests, by number
        self._planned: dict[int, SchedulerOutput] = {}  # by step, until its result comes
        self.recorder = RecordingScheduler(
            make_scheduler or load_policy(header.config.policy),
            header.config,
            header.make_kv_cache(),
            max_model_len=header.max_model_len,
            clock=lambda: self._now,
            sink=self._sink,
        )
        self._sink.records.clear()  # the header

    @property
    def scheduler(self) -> SchedulerInterface:
        """The scheduler that is replayed."""
        return self.recorder.live

    def feed(self, record: AnyRecord) -> Record:
        """Make the recorded call, and return what is recorded of it now."""
        self._now = record.time
        try:
            self._call(record)
        except FROM_OUTSIDE:
            raise
        except BaseException:
            if not self._sink.records:
                raise  # not the scheduler's: that would have been noted
        return self._sink.records.pop()

    def _call(self, record: AnyRecord) -> None:
        recorder = self.recorder
        match record:
            case Added():
                if record.error is None:
                    self._ids.append(record.spec.request_id)
                recorder.add_request(Request(record.spec))
            case Planned():
                output = recorder.schedule()
                if isinstance(output, SchedulerOutput):
                    self._planned[output.step_id] = output
            case Updated():
                output = self._planned.pop(record.step_id)
                req_ids = list(output.num_scheduled_tokens)
                drafts = {self._name(name): token_ids for name, token_ids in record.drafts}
                values = {self._name(name): own for name, own in record.row_values}
                tokens = record.sampled_token_ids
                sat_out = list(map(self._name, record.sat_out))
                result = ModelRunnerOutput(
                    req_ids, tokens, {}, drafts, row_values=values, sat_out=sat_out
                )
                try:
                    recorder.update_from_output(output, result)
                except FROM_OUTSIDE:
                    raise
                except BaseException:
                    recorder.abandon_step(output)  # as the engine does
                    raise
            case Finished():
                asked = None if record.asked is None else list(map(self._name, record.asked))
                recorder.finish_requests(asked, RequestStatus(record.status))
            case Expired():
                recorder.expire_requests()
            case Discarded():
                recorder.discard_step(record.last_step_id)
            case Reset():
                recorder.reset_prefix_cache()
            case Switched():
                recorder.switch(record.config)
            case Closed():
                recorder.shutdown()
            case _:
                raise ConfigError("a second header in the decision log")

    def _name(self, name: Name) -> str:
        return self._ids[name] if isinstance(name, int) else name


class _ListSink(RecordSink):
    """Keeps records in a list."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)


def replay(log: DecisionLog, make_scheduler: MakeScheduler | None = None) -> ReplayResult:
    """Replay until the first call that comes out differently.

    `make_scheduler` replaces the recorded policy. Raises `ConfigError` for a damaged log or a
    policy that cannot be loaded.
    """
    player, chronicle = Replay(log.header, make_scheduler), Chronicle(log.header)
    divergence = None
    for index, record in enumerate(log):
        written = player.feed(record)
        if not agree(record, written):
            before = Replay(log.header, make_scheduler)
            for earlier in islice(log, index):
                before.feed(earlier)
            divergence = Divergence(
                record.step_id if isinstance(record, Planned) else chronicle.num_steps,
                record,
                written,
                list(differences(record, written, chronicle)),
                list(describe_state(before.scheduler)),
            )
            break
        chronicle.feed(record)
    return ReplayResult(chronicle.num_steps, len(chronicle.lives), chronicle.policies, divergence)


def agree(recorded: Record, replayed: Record) -> bool:
    """Return whether both say the same, but for what was measured and the words of errors."""
    return _comparable(recorded) == _comparable(replayed)


def _comparable(record: Record) -> Record:
    changes: dict[str, Any] = dict.fromkeys(record.MEASURED, 0.0)
    if error := getattr(record, "error", None):
        changes["error"] = error.partition(":")[0]  # its type: words may name addresses
    return msgspec.structs.replace(record, **changes)


def differences(recorded: Record, replayed: Record, chronicle: Chronicle) -> Iterator[str]:
    """Yield the differences in words, a line each; `chronicle` has not been fed `recorded` yet."""
    was, now = _readable(recorded, chronicle), _readable(replayed, chronicle)
    for what, old in was.items():
        new = now.get(what)
        if not (isinstance(old, dict) and isinstance(new, dict)):
            if old != new:
                yield f"{what}: recorded {_short(old)}, now {_short(new)}"
            continue
        # A request in only one of the two steps differs in everything: once is enough.
        keys = old | new if what == "tokens" else {key: 0 for key in old if key in new}
        changed = [key for key in keys if old.get(key) != new.get(key)]
        for key in changed[:MAX_SHOWN]:
            yield f"{what} of {key}: recorded {old.get(key, 0)}, now {new.get(key, 0)}"
        if len(changed) > MAX_SHOWN:
            yield f"{what}: {len(changed) - MAX_SHOWN} more requests differ"


def _readable(record: Record, chronicle: Chronicle) -> dict[str, Any]:
    """Return the fields of a record by what they mean, with ids of requests."""
    fields = {
        name: getattr(record, name)
        for name in record.__struct_fields__
        if name not in ("time", *record.MEASURED)
    }
    if not isinstance(record, Planned):
        if "ended" in fields and not isinstance(record, Updated):
            fields["ended"] = chronicle.names(fields["ended"])
        return fields
    req_ids = chronicle.req_ids(record)
    del fields["requests"], fields["num_tokens"], fields["new"], fields["new_block_ids"]
    lengths = {chronicle.name(name): length for name, length in fields.pop("draft_lengths")}
    tokens = dict(zip(req_ids, record.num_tokens or [1] * len(req_ids), strict=True))
    new = [(chronicle.name(name), cached, blocks) for name, cached, blocks in record.new]
    return {
        "tokens": tokens,
        "batch order": req_ids,
        "cached tokens": {request_id: cached for request_id, cached, _ in new},
        "blocks": {request_id: blocks for request_id, _, blocks in new},
        "more blocks": {chronicle.name(name): blocks for name, blocks in record.new_block_ids},
        **fields,
        "draft length": {request_id: lengths.get(request_id) for request_id in req_ids},
        "preempted": chronicle.names(record.preempted),
        "paused": chronicle.names(record.paused),
        "finished": chronicle.names(record.finished),
    }


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > MAX_SHOWN:
        return f"[{', '.join(map(str, value[:MAX_SHOWN]))}, ... {len(value)} in all]"
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)


def describe_state(scheduler: SchedulerInterface) -> Iterator[str]:
    """Lines on which requests run, which wait first, and how full the KV cache is."""
    num_running, num_waiting = scheduler.get_request_counts()
    if not isinstance(scheduler, BaseScheduler):
        yield f"{num_running} running, {num_waiting} waiting"
        return
    pool = scheduler.kv_cache.pool
    yield f"running: {num_running}"
    yield from map(_describe, scheduler.running[:MAX_SHOWN])
    yield f"waiting: {num_waiting}"
    yield from map(_describe, islice(scheduler.waiting, MAX_SHOWN))
    yield f"KV blocks: {pool.num_used_blocks} of {pool.num_blocks} in use"


def _describe(request: Request) -> str:
    return (
        f"  {request.request_id}: {request.status.name}, {request.num_computed_tokens} of "
        f"{request.num_tokens} tokens computed ({request.num_prompt_tokens} prompt), arrived "
        f"{request.arrival_time:.3f}, priority {request.priority}, {len(request.block_ids)} blocks"
    )
