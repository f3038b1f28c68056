"""What a scheduler decided, one line a step: what golden files hold, and differences are shown in.

    12 r07 r03+16 r09@32+8 r11+4~3 | preempt r01 | end r02:length | wait r05:blocks

Step 12 runs r07 with one token, 16 of r03, r09 enters with 32 tokens found in the cache and 8 to
compute, 3 of the 4 tokens of r11 are drafts. r01 lost its place, r02 has ended since the last step,
and r05 waits for blocks, as it did not before: a reason is told when it changes. `r09@0+8&0,1` runs
the images 0 and 1. Knows what calls of a scheduler mean; how a log holds them, its reader knows.
"""

from collections.abc import Iterator
from itertools import zip_longest

from aioserve.lab.decision_log.reader import Chronicle, DecisionLog
from aioserve.lab.decision_log.records import (
    Added,
    AnyRecord,
    Discarded,
    Expired,
    Finished,
    Planned,
    Reset,
    Updated,
)
from aioserve.lab.decision_log.replay import Replay, agree
from aioserve.request import RequestStatus

NUM_BEFORE, NUM_AFTER = 4, 3  # lines of context that a difference is shown with


def lines_of(log: DecisionLog) -> list[str]:
    """The decisions of a log. Why requests waited is not in it: today's scheduler says that, for
    as long as it decides the same.
    """
    return list(_Teller(log).lines())


class _Teller:
    def __init__(self, log: DecisionLog) -> None:
        self._log = log
        self._chronicle = Chronicle(log.header)
        self._replay: Replay | None = Replay(log.header)
        self._reasons: dict[str, str] = {}  # as they were told
        self._events: list[str] = []  # since the last step

    def lines(self) -> Iterator[str]:
        for record in self._log:
            if self._replay is not None and not agree(record, self._replay.feed(record)):
                self._replay = None
            step = None
            if isinstance(record, Planned):
                words = [f"failed:{record.error}"] if record.error else self._rows(record)
                step = " ".join([str(record.step_id), *words])
            else:
                self._note(record)
            self._chronicle.feed(record)
            if isinstance(record, Planned):
                parts = [step, self._preempted(record), *self._events, self._waiting()]
                self._events = []
                yield " | ".join(part for part in parts if part)
        yield " | ".join(["end of the log", *self._events])

    def _rows(self, planned: Planned) -> list[str]:
        name = self._chronicle.name
        req_ids = self._chronicle.req_ids(planned)
        cached = {name(n): f"@{num_cached}" for n, num_cached, _ in planned.new}
        drafts = {name(n): f"~{len(token_ids)}" for n, token_ids in planned.drafts}
        images = {name(n): "&" + ",".join(map(str, found)) for n, found in planned.encoder_inputs}
        rows = []
        for request_id, count in zip(
            req_ids, planned.num_tokens or [1] * len(req_ids), strict=True
        ):
            more = [marks.get(request_id, "") for marks in (cached, drafts, images)]
            num_tokens = f"+{count}" if count > 1 or any(more) else ""
            rows.append(f"{request_id}{more[0]}{num_tokens}{more[1]}{more[2]}")
        return rows or ["-"]

    def _preempted(self, planned: Planned) -> str:
        paused = self._chronicle.names(planned.paused)
        preempted = [n for n in self._chronicle.names(planned.preempted) if n not in paused]
        words = [("preempt", preempted), ("pause", paused)]
        return " | ".join(f"{word} {' '.join(names)}" for word, names in words if names)

    def _note(self, record: AnyRecord) -> None:
        names = self._chronicle.names
        ended: list[tuple[str, str]] = []
        match record:
            case Added(error=str()):
                self._events.append(f"refuse {record.spec.request_id}")
            case Updated():
                ended = [(names([n])[0], reason) for n, reason in record.ended]
            case Finished():
                reason = RequestStatus(record.status).finish_reason
                ended = [(n, reason or "?") for n in names(record.ended)]
            case Expired():
                ended = [(n, "timeout") for n in names(record.ended)]
            case Discarded():
                ended = [(n, "error") for n in names(record.ended)]
            case Reset():
                self._events.append("reset" if record.is_empty else "reset, blocks are held")
        if ended:
            self._events.append("end " + " ".join(f"{n}:{reason}" for n, reason in ended))

    def _waiting(self) -> str:
        if self._replay is None:
            return "wait ?"
        scheduler = self._replay.scheduler
        reasons = {name: reason.value for name, reason in scheduler.get_wait_reasons().items()}
        news = [f"{n}:{why}" for n, why in reasons.items() if self._reasons.get(n) != why]
        self._reasons = reasons
        return f"wait {' '.join(news)}" if news else ""


def difference(recorded: list[str], now: list[str]) -> str | None:
    """The first step that came out differently, with what was around it; None: there is none."""
    for place, (was, got) in enumerate(zip_longest(recorded, now)):
        if was != got:
            shown = [f"    {line}" for line in recorded[max(place - NUM_BEFORE, 0) : place]]
            shown += [f"  - {line}" for line in recorded[place : place + NUM_AFTER]]
            shown += [f"  + {line}" for line in now[place : place + NUM_AFTER]]
            return f"line {place + 1} differs (- recorded, + now):\n" + "\n".join(shown)
    return None
