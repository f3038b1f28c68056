"""Reads a decision log, and follows requests and steps through its records.

Knows the file and the format of its records; makes no call of a scheduler.
"""

import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aioserve.errors import UNREADABLE, ConfigError, RequestError, one_line
from aioserve.lab.decision_log.recorder import FRAME_HEAD, RECORD_HEAD
from aioserve.lab.decision_log.records import (
    FORMAT_VERSION,
    MAGIC,
    OLDEST_FORMAT,
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
    Switched,
    Updated,
)
from aioserve.outputs import FinishReason
from aioserve.request import RequestStatus
from aioserve.scheduler.output import StepFeatures


class DecisionLog:
    """A file of records, read anew by every iteration: an hour of them is larger than memory."""

    def __init__(self, path: str | Path) -> None:
        """Raises `ConfigError` if it is no decision log that this version can read."""
        self.path = Path(path)
        self.is_complete = False  # known after an iteration: whether the server closed it
        first = next(self._records(), None)
        if not isinstance(first, Header):
            raise ConfigError(f"decision log {path} ends before its header")
        self.header = first
        try:
            self.config = first.config
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"decision log {path} was written by aioserve {first.version}, whose settings "
                f"this version does not know: {one_line(error)}"
            ) from error

    def __iter__(self) -> Iterator[AnyRecord]:
        """Return all records after the header. Raises `ConfigError` at what is damaged; a record
        that was being written when the server died is left out.
        """
        records = self._records()
        next(records)
        return records

    def _records(self) -> Iterator[AnyRecord]:
        self.is_complete = False
        decoder = msgspec.msgpack.Decoder(AnyRecord)
        for offset, frame in self._frames():
            view, start = memoryview(frame), 0
            while start < len(view):
                if len(view) - start < RECORD_HEAD.size:
                    raise self._damaged(offset, "a record ends before its length")
                (length,) = RECORD_HEAD.unpack_from(view, start)
                start += RECORD_HEAD.size
                try:
                    record = decoder.decode(view[start : start + length])
                except (RequestError, *UNREADABLE) as error:
                    raise self._damaged(offset, one_line(error)) from error
                start += length
                self.is_complete = isinstance(record, Closed)
                yield record

    def _frames(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                self._check_version(file.readline(100))
                while len(head := file.read(FRAME_HEAD.size)) == FRAME_HEAD.size:
                    offset = file.tell()
                    length, checksum = FRAME_HEAD.unpack(head)
                    body = file.read(length)
                    if len(body) < length:
                        return  # torn: the server died while it wrote
                    if zlib.crc32(body) != checksum:
                        raise self._damaged(offset, "wrong checksum")
                    try:
                        yield offset, zlib.decompress(body)
                    except zlib.error as error:
                        raise self._damaged(offset, str(error)) from error
        except OSError as error:
            raise ConfigError(f"cannot read decision log {self.path}: {error.strerror}") from error

    def _check_version(self, line: bytes) -> None:
        version = line.removeprefix(MAGIC)
        if version == line or not version.strip().isdigit():
            raise ConfigError(f"{self.path} is not a decision log")
        if not OLDEST_FORMAT <= int(version) <= FORMAT_VERSION:
            raise ConfigError(
                f"decision log {self.path} has format {int(version)}; this version of aioserve "
                f"reads formats {OLDEST_FORMAT} to {FORMAT_VERSION}"
            )

    def _damaged(self, offset: int, what: str) -> ConfigError:
        return ConfigError(f"decision log {self.path} is damaged at byte {offset}: {what}")


# Requests and steps, followed through the records, which are believed: `replay` runs a scheduler.


# Between the end of a step and the plan of the next, if the engine has work: what is longer is
# idleness. A guess, ten times what a busy engine takes.
MAX_HANDOVER_SECONDS = 0.005
MAX_NAMED_SWITCHES = 3


class Life:
    """One accepted request, from its arrival to its end. Times in seconds since the log began."""

    def __init__(self, added: Added, began: float, *, keep_prompt: bool) -> None:
        token_ids = added.spec.prompt_token_ids
        # Thousands are kept: as an array, and only if `keep_prompt` asks for it.
        self.spec = msgspec.structs.replace(added.spec, prompt_token_ids=())
        self.prompt = array("q", token_ids) if keep_prompt else None
        self.num_prompt_tokens = len(token_ids)
        self.added_at = added.time - began
        self.arrival = arrival = added.spec.arrival_time - began
        self.tokens: array[int] = array("q")
        self.token_times: array[float] = array("d")
        self.phases: list[tuple[float, str]] = [(arrival, "queued")]  # each with its begin
        self.num_preemptions = 0
        self.num_cached_tokens = 0  # at its first admission
        self.num_computed = 0
        self.num_tried_drafts = 0  # up to the first wrong one of each step
        self.num_right_drafts = 0
        self.end: float | None = None
        self.finish_reason: str | None = None  # None: not ended by then
        self.was_cut = False  # the server shut down; its client would have stayed

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    def enter(self, phase: str, time: float) -> None:
        """Another phase begins: queued, prefill, decode, preempted, paused."""
        if self.phases[-1][1] != phase:
            self.phases.append((time, phase))

    def leave(self, time: float, *, is_paused: bool) -> None:
        """Note that the request leaves the batch, preempted or paused."""
        self.num_preemptions += not is_paused
        self.enter("paused" if is_paused else "preempted", time)

    def come(self, time: float, num_computed: int) -> None:
        """Note that the request enters the batch with `num_computed` tokens computed."""
        was_paused = self.phases[-1][1] == "paused"
        if not (self.num_preemptions or was_paused):
            self.num_cached_tokens = num_computed
        self.num_computed = num_computed
        is_decoding = was_paused and num_computed >= self.num_prompt_tokens + len(self.tokens) - 1
        self.enter("decode" if is_decoding and self.tokens else "prefill", time)


class StepLife(NamedTuple):
    """A step that came back. Times in seconds since the log began."""

    step_id: int
    began: float  # computing, as far as can be told: handed over, and the one before was back
    ended: float
    features: StepFeatures
    num_tokens: int
    seconds: float  # what it cost, with planning and hand-over if the engine was busy


class Switch(NamedTuple):
    """Another policy took over. Time in seconds since the log began."""

    time: float
    scheduler: dict[str, Any]  # SchedulerConfig


class Chronicle:
    """The story of requests and steps so far, from records. Feed it every record, in order."""

    def __init__(self, header: Header, *, keep_prompts: bool = False) -> None:
        self.lives: list[Life] = []  # of all requests that were accepted
        self.active: dict[str, Life] = {}
        self.switches: list[Switch] = []  # without the refused ones
        self.num_refused = 0
        self.num_steps = 0  # planned
        self.longest_draft = 0  # tokens
        self.now = 0.0
        self._keep_prompts = keep_prompts
        self._header = header
        self._last_step_id = 0
        self._req_ids: list[str] = []  # of the last step
        self._in_flight: deque[tuple[Planned, list[Life], StepFeatures]] = deque()
        self._last_back = 0.0

    def feed(self, record: Record) -> StepLife | None:
        """Take in one record; the step, if it brought one back. Raises `ConfigError` for a record
        that cannot follow those before it: its checksum fits, and no server has written it.
        """
        try:
            return self._feed(record)
        except (LookupError, ValueError, TypeError, ArithmeticError) as error:
            raise self._contradiction(f"{type(record).__name__}: {one_line(error)}") from error

    def _contradiction(self, what: str) -> ConfigError:
        return ConfigError(f"the decision log contradicts itself at {self.now:.3f} s: {what}")

    def _feed(self, record: Record) -> StepLife | None:
        self.now = record.time - self._header.time
        match record:
            case Added():
                self._add(record)
            case Planned(error=None) if record.step_id > self._last_step_id:
                self._plan(record)
            case Updated():
                return self._update(record)
            case Finished():
                status = RequestStatus(record.status)
                if status is RequestStatus.FINISHED_ABORTED and record.asked is None:
                    for life in self.active.values():
                        life.was_cut = True
                self._end(record.ended, status.finish_reason)
            case Expired():
                self._end(record.ended, FinishReason.TIMEOUT)
            case Switched(error=None):
                self.switches.append(Switch(self.now, record.scheduler))
            case Discarded():
                while self._in_flight and self._in_flight[-1][0].step_id > record.last_step_id:
                    self._in_flight.pop()
                self._end(record.ended, FinishReason.ERROR)
        return None

    @property
    def policies(self) -> str:
        """Those that decided so far, in words: "fcfs, then hrrn from 3.2 s"."""
        words = [self._header.scheduler["policy"]]
        for switch in self.switches[:MAX_NAMED_SWITCHES]:
            words.append(f"then {switch.scheduler['policy']} from {switch.time:.1f} s")
        if more := len(self.switches[MAX_NAMED_SWITCHES:]):
            words.append(f"then {more} more, the last {self.switches[-1].scheduler['policy']}")
        return ", ".join(words)

    def name(self, name: Name) -> str:
        """Return the request's id. Raises `ConfigError` as `feed` does."""
        if isinstance(name, str):
            return name
        if not 0 <= name < len(self.lives):
            raise self._contradiction(f"request {name} of {len(self.lives)}")
        return self.lives[name].request_id

    def names(self, names: list[Name]) -> list[str]:
        """Return the ids of the named requests. Raises `ConfigError` as `feed` does."""
        return [self.name(name) for name in names]

    def req_ids(self, planned: Planned) -> list[str]:
        """Ids of the requests in a step, in batch order; to be asked before it is fed."""
        return self._req_ids if planned.requests is None else self.names(planned.requests)

    def _add(self, added: Added) -> None:
        if added.error is not None:
            self.num_refused += 1
            return
        life = Life(added, self._header.time, keep_prompt=self._keep_prompts)
        self.lives.append(life)
        self.active[life.request_id] = life

    def _plan(self, planned: Planned) -> None:
        self.num_steps += 1
        self._last_step_id = planned.step_id
        self._req_ids = self.req_ids(planned)
        paused = set(self.names(planned.paused))
        for request_id in self.names(planned.preempted):
            if life := self.active.get(request_id):
                life.leave(self.now, is_paused=request_id in paused)
        for name, num_cached, _ in planned.new:
            self.active[self.name(name)].come(self.now, num_cached)
        if self._req_ids:
            # Lives, not ids: an id may be used anew before the step is back.
            lives = [self.active[request_id] for request_id in self._req_ids]
            self._in_flight.append((planned, lives, self._advance(planned, lives)))

    def _advance(self, planned: Planned, lives: list[Life]) -> StepFeatures:
        """Computed counts rise when a step is planned; its features are of that moment."""
        num_tokens = planned.num_tokens or [1] * len(lives)
        drafts = {self.name(name): len(token_ids) for name, token_ids in planned.drafts}
        prefills, num_context = [], 0
        for life, count in zip(lives, num_tokens, strict=True):
            life.num_computed += count
            num_context += life.num_computed
            if count > 1 and life.request_id not in drafts:
                prefills.append((count, life.num_computed))
        num_decodes = len(lives) - len(prefills) - len(drafts)
        features = StepFeatures.of(num_decodes, num_context, prefills)
        return features.with_drafts(len(drafts), sum(drafts.values()))

    def _update(self, updated: Updated) -> StepLife | None:
        while self._in_flight and self._in_flight[0][0].step_id < updated.step_id:
            self._in_flight.popleft()  # a policy raised over its result
        if not self._in_flight:
            return None
        planned, lives, features = self._in_flight.popleft()
        drafted = {self.name(name): len(token_ids) for name, token_ids in planned.drafts}
        self.longest_draft = max(self.longest_draft, *drafted.values(), 0)
        for life, token_ids in zip(lives, updated.sampled_token_ids, strict=True):
            is_dropped = life.spec.sampling_params.max_tokens == 0  # it was asked about its prompt
            if life.end is None and token_ids and not is_dropped:
                self._append(life, token_ids, drafted.get(life.request_id, 0))
        for name, reason in updated.ended:
            self._end([name], FinishReason(reason))
        return self._step(planned, features)

    def _append(self, life: Life, token_ids: list[int], num_drafts: int) -> None:
        life.tokens.extend(token_ids)
        life.token_times.extend([self.now] * len(token_ids))
        if num_drafts:  # all but the newest are computed; the wrong ones do not count
            life.num_right_drafts += len(token_ids) - 1
            life.num_tried_drafts += min(len(token_ids), num_drafts)
            life.num_computed = life.num_prompt_tokens + len(life.tokens) - 1
        if life.phases[-1][1] == "prefill":
            life.enter("decode", self.now)

    def _step(self, planned: Planned, features: StepFeatures) -> StepLife:
        asked = planned.time - self._header.time
        is_busy = asked - self._last_back < MAX_HANDOVER_SECONDS
        step = StepLife(
            planned.step_id,
            max(asked + planned.took, self._last_back),
            self.now,
            features,
            features.num_prefill_tokens + features.num_decodes,
            self.now - (self._last_back if is_busy and self._last_back else asked),
        )
        self._last_back = self.now
        return step

    def _end(self, names: list[Name], reason: FinishReason | None) -> None:
        for name in names:
            life = self.active.pop(self.name(name), None)
            if life is not None:
                life.end = self.now
                life.finish_reason = None if reason is None else reason.value
