"""Plans that a policy makes in another process, and the check of each before it runs.

The workload, the lengths of replies, the clock and all that is measured are on one end of a line.
On the other is a scheduler with the policy, which hears what a server's scheduler hears: requests
when they come, under drawn ids, and the runner's tokens. Nothing that it says is believed: a plan
is checked against requests, limits and KV blocks, and tokens and ends are this end's own.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any, NoReturn, TypeVar, Union

import msgspec

from aioserve.config import SchedulerConfig
from aioserve.errors import (
    ConfigError,
    EngineOverloadedError,
    PolicyError,
    RequestError,
)
from aioserve.kv_cache import KVCacheManager
from aioserve.lab.evaluate.batch import Batch, Row, forged
from aioserve.lab.evaluate.enclosure import Channel, Failed, Gone
from aioserve.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    ModelRunnerOutput,
    SchedulerStats,
)
from aioserve.request import ROW_VALUES, Request, RequestSpec, RequestStatus, check_names
from aioserve.scheduler import BaseScheduler, SchedulerInterface
from aioserve.scheduler.blame import as_policy_error, blamed, describe_result
from aioserve.scheduler.interface import Rejection
from aioserve.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput

# What crosses the line, as MessagePack. A request is named by a number: how many came before it.


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of the messages between the simulation and the process of the candidate."""


class Result(Message, frozen=True):
    """The result of the oldest step in flight: tokens for each of its rows."""

    now: float  # seconds of the clock of the simulation
    sampled: list[list[int]]
    row_values: list[dict[str, float]] = []  # by row, if the policy wants any


class Ended(Message, frozen=True):
    """Requests that have ended from outside."""

    now: float
    requests: list[int]
    status: int


Event = Result | Ended


class Begin(Message, frozen=True):
    """The limits of the engine; the answer is `Ready`."""

    settings: SchedulerConfig
    max_model_len: int
    num_blocks: int
    block_size: int
    is_caching: bool
    num_watermark_blocks: int


class Come(Message, frozen=True):
    """A request that has come; the answer is `Ready`, or `Refused`."""

    now: float
    events: list[Event]  # since the last message, in order
    spec: RequestSpec


class Turn(Message, frozen=True):
    """A question for the next step; the answer is `Plan`."""

    now: float
    events: list[Event]


class Expire(Message, frozen=True):
    """A word that deadlines have passed; the answer is `Expired`."""

    now: float
    events: list[Event]


class Hello(Message, frozen=True):
    """The facts of the policy's class that the simulation has to know before it begins."""

    name: str
    runs_whole_prompts: bool
    options: dict[str, Any]  # by default


class Ready(Message, frozen=True):
    """An answer that it is done, and when the next deadline passes, if there is one."""

    expiry: float | None = None


class Refused(Message, frozen=True):
    """A request that is not taken, and why."""

    is_overloaded: bool
    words: str


class Admitted(Message, frozen=True):
    """A request that enters the batch behind tokens whose KV blocks are there."""

    request: int
    num_computed: int
    block_ids: list[int]


class Plan(Message, frozen=True):
    """One step. `rows` are requests in the order of the batch; None: those of the step before. A
    row has one token where `tokens` is None.
    """

    step_id: int
    rows: list[int] | None
    tokens: list[int] | None
    admitted: list[Admitted]
    grown: dict[int, list[int]]  # new blocks
    preempted: list[int]
    paused: list[int]  # of the preempted, those that keep their blocks
    rejected: dict[int, tuple[str, float]]  # reason, and seconds after which to come again
    wanted: tuple[str, ...]  # names of row values
    wake: float | None
    expiry: float | None


class Expired(Message, frozen=True):
    """Requests that have ended, as their deadlines have passed."""

    requests: list[int]
    expiry: float | None


Asked = Union[Begin, Come, Turn, Expire]  # noqa: UP007 - as an argument of a decoder
Answer = Union[Hello, Ready, Refused, Plan, Expired]  # noqa: UP007
_encode = msgspec.msgpack.Encoder().encode
_A = TypeVar("_A", bound=Message)


# The end of the policy.


def serve_plans(policy: type[BaseScheduler], line: Channel) -> NoReturn:
    """Plan for the simulation on the other end of the line, as long as it asks. Raises what the
    policy raises, as an error of ours that names its line.
    """
    decode = msgspec.msgpack.Decoder(Asked).decode
    options = msgspec.to_builtins(policy.parse_options({}))
    line.send(_encode(Hello(policy.__name__, bool(policy.runs_whole_prompts), options)))
    begin = decode(line.receive())
    assert isinstance(begin, Begin)
    planner = _Planner(policy, begin)
    line.send(_encode(Ready()))
    while True:
        line.send(_encode(planner.answer(decode(line.receive()))))


class _Planner:
    """A scheduler whose calls come over the line."""

    def __init__(self, policy: type[BaseScheduler], begin: Begin) -> None:
        self._policy = policy
        self._now = 0.0
        kv_cache = KVCacheManager(
            begin.num_blocks, begin.block_size, enable_prefix_caching=begin.is_caching
        )
        kv_cache.num_watermark_blocks = begin.num_watermark_blocks
        with blamed(policy, "__init__()"):
            self._scheduler = policy(
                begin.settings,
                kv_cache,
                max_model_len=begin.max_model_len,
                clock=lambda: self._now,
            )
        self._numbers: dict[str, int] = {}  # of the requests that came, by id
        self._ids: list[str] = []
        self._in_flight: deque[SchedulerOutput] = deque()
        self._last: dict[str, int] | None = None  # rows of the last plan

    def answer(self, asked: Asked) -> Answer:
        """Return the answer to a message."""
        assert not isinstance(asked, Begin)
        for event in asked.events:
            self._hear(event)
        self._now = asked.now
        if isinstance(asked, Turn):
            return self._plan()
        if isinstance(asked, Come):
            return self._add(asked.spec)
        with blamed(self._policy, "expire_requests()"):
            expired = self._scheduler.expire_requests()
        return Expired([self._numbers[name] for name in expired], self._scheduler.next_expiry())

    def _hear(self, event: Event) -> None:
        self._now = event.now
        if isinstance(event, Ended):
            ids = [self._ids[number] for number in event.requests]
            self._scheduler.finish_requests(ids, RequestStatus(event.status))
            return
        output = self._in_flight.popleft()
        names = list(output.num_scheduled_tokens)
        values = dict(zip(names, event.row_values, strict=True)) if event.row_values else {}
        result = ModelRunnerOutput(names, event.sampled, row_values=values)
        with blamed(self._policy, "update_from_output()"):
            self._scheduler.update_from_output(output, result)

    def _add(self, spec: RequestSpec) -> Answer:
        try:
            with blamed(self._policy, "add_request()"):
                self._scheduler.check_queue(len(spec.prompt_token_ids), 0, 0)
                self._scheduler.add_request(Request(spec))
        except (EngineOverloadedError, RequestError) as error:
            return Refused(isinstance(error, EngineOverloadedError), str(error))
        self._numbers[spec.request_id] = len(self._ids)
        self._ids.append(spec.request_id)
        return Ready(self._scheduler.next_expiry())

    def _plan(self) -> Plan:
        try:
            output = self._scheduler.schedule()
        except Exception as error:
            raise as_policy_error(error, self._policy, "schedule()") from error
        if not isinstance(output, SchedulerOutput):
            raise PolicyError(
                f"policy {self._policy.__name__}: schedule() must return the output() of a new "
                f"step, got {describe_result(output)}"
            )
        rejections = self._scheduler.take_rejections()
        numbers, scheduled = self._numbers, output.num_scheduled_tokens
        is_same, self._last = scheduled is self._last, scheduled
        are_single = output.total_num_scheduled_tokens == len(scheduled)
        if output.total_num_scheduled_tokens:
            self._in_flight.append(output)
        return Plan(
            output.step_id,
            None if is_same else [numbers[name] for name in scheduled],
            None if are_single else list(scheduled.values()),
            [
                Admitted(numbers[new.request_id], new.num_computed_tokens, new.block_ids)
                for new in output.scheduled_new_reqs
            ],
            {
                numbers[name]: block_ids
                for name, block_ids in output.scheduled_cached_reqs.new_block_ids.items()
            },
            [numbers[name] for name in output.preempted_req_ids],
            [numbers[name] for name in output.paused_req_ids],
            {numbers[name]: (why.reason, why.retry_after) for name, why in rejections.items()},
            next(iter(output.parts[ROW_VALUES].values())) if ROW_VALUES in output.parts else (),
            self._scheduler.next_wake(),
            self._scheduler.next_expiry(),
        )


# The end of the simulation.


class Sitting(msgspec.Struct, gc=False):
    """A line on which a policy has said hello, for one run of a simulation."""

    line: Channel
    hello: Hello
    key: bytes  # by which ids are drawn
    failure: Failed | Gone | None = None  # how it ended before its time


#: The sitting of the simulation that runs: the engine makes its scheduler from a name alone.
SITTING: ContextVar[Sitting] = ContextVar("sitting")


def greet(line: Channel, key: bytes) -> Sitting:
    """Return the sitting of a policy that has just been started. Raises `Failed`."""
    return Sitting(line, _answer(line.receive(), Hello), key)


def _answer(data: bytes, *kinds: type[_A]) -> _A:
    """Return an answer of one of these kinds. Raises `Failed` for anything else."""
    try:
        found = _ANSWERS.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise forged(f"what it says is no answer ({error})") from error
    if not isinstance(found, kinds):
        raise forged(f"it says {type(found).__name__} out of turn")
    return found


_ANSWERS = msgspec.msgpack.Decoder(Answer)


class GuestScheduler(SchedulerInterface):
    """The policy of the `SITTING`, as the engine of a simulation sees it. What its process says is
    checked; at the first thing that cannot be, `Failed` is raised, and kept in the sitting.
    """

    runs_whole_prompts = False

    def __init__(
        self,
        settings: SchedulerConfig,
        kv_cache: KVCacheManager,
        *,
        max_model_len: int,
        clock: Callable[[], float],
    ) -> None:
        if kv_cache.resources or kv_cache.connector is not None or kv_cache.max_draft_tokens:
            raise ConfigError(
                "a policy in another process plans KV blocks alone: no drafts, states, windows or "
                "KV connector"
            )
        self._sitting = SITTING.get()
        self._settings = settings
        self._clock = clock
        self._max_model_len = max_model_len
        self._rows: list[Row] = []  # of all requests that came, by number
        self._by_id: dict[str, Row] = {}  # the unfinished ones
        self._events: list[Event] = []
        self._in_flight: deque[list[Row]] = deque()
        self._untold: list[str] = []  # ids that ended, of requests that the runner knows
        self._rejected: dict[str, Rejection] = {}
        self._due: list[tuple[float, int]] = []  # deadlines, with the number of the request
        self._wake: float | None = None
        self._expiry: float | None = None
        self._batch = Batch(settings, kv_cache, max_model_len, whole=self.runs_whole_prompts)
        self._last: tuple[list[Row], list[str], dict[str, int]] = ([], [], {})
        self._num_steps = 0
        self._num_preemptions = 0
        begin = Begin(
            settings,
            max_model_len,
            kv_cache.pool.num_blocks,
            kv_cache.block_size,
            kv_cache.enable_prefix_caching,
            kv_cache.num_watermark_blocks,
        )
        self._ask(begin, Ready)

    @property
    def policy(self) -> type[SchedulerInterface]:
        """A class of the policy's name."""
        return type(self._sitting.hello.name, (GuestScheduler,), {})

    def settle(self) -> None:
        """Have the other end take in what it has not been told yet."""
        self._ask(Expire(self._clock(), self._take_events()), Expired)

    # SchedulerInterface.

    def add_request(self, request: Request) -> None:
        request.bound_length(self._max_model_len)
        number = len(self._rows)
        drawn = blake2b(number.to_bytes(8, "little"), key=self._sitting.key, digest_size=12)
        spec = msgspec.structs.replace(request.spec, request_id=drawn.hexdigest())
        answer = self._ask(Come(self._clock(), self._take_events(), spec), Ready, Refused)
        if isinstance(answer, Refused):
            error = EngineOverloadedError if answer.is_overloaded else RequestError
            raise error(answer.words[:500])
        row = Row(request, number)
        self._rows.append(row)
        self._by_id[request.request_id] = row
        if request.deadline is not None:
            heappush(self._due, (request.deadline, number))

    def schedule(self) -> SchedulerOutput:
        plan = self._ask(Turn(self._clock(), self._take_events()), Plan)
        with self._kept():
            return self._take_in(plan)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        now, sampled = self._clock(), model_runner_output.sampled_token_ids
        values = model_runner_output.row_values
        told = [values.get(r, {}) for r in model_runner_output.req_ids] if values else []
        self._events.append(Result(now, sampled, told))
        outputs: dict[int, list[EngineCoreOutput]] = {}
        for row, token_ids in zip(self._in_flight.popleft(), sampled, strict=True):
            if not token_ids:
                continue
            row.num_coming -= 1
            request = row.request
            if row.has_ended:
                continue
            output = self._append(row, token_ids)
            outputs.setdefault(request.client_index, []).append(output)
        return {client: EngineCoreOutputs(outs, now) for client, outs in outputs.items()}

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[str]:
        if request_ids is None:
            request_ids = list(self._by_id)
        elif isinstance(request_ids, str):
            request_ids = [request_ids]
        rows = [row for name in request_ids if (row := self._by_id.get(name)) is not None]
        if rows:
            numbers = [row.number for row in rows]
            self._events.append(Ended(self._clock(), numbers, int(finished_status)))
        return [self._end(row, finished_status) for row in rows]

    def expire_requests(self) -> list[str]:
        now = self._clock()
        found = self._ask(Expire(now, self._take_events()), Expired)
        self._expiry = found.expiry
        with self._kept():
            rows = [self._row(number) for number in found.requests]
            if early := [row.number for row in rows if not self._is_due(row.request, now)]:
                raise forged(f"request {early[0]} has ended before its deadline")
            ended = [self._end(row, RequestStatus.FINISHED_TIMEOUT) for row in rows]
            while self._due and self._due[0][0] <= now:
                if not (row := self._rows[heappop(self._due)[1]]).has_ended:
                    raise forged(f"request {row.number} goes on after its deadline")
        return ended

    def get_num_unfinished_requests(self) -> int:
        return len(self._by_id)

    def get_request_counts(self) -> tuple[int, int]:
        return self._batch.num_rows, len(self._by_id) - self._batch.num_rows

    def has_unfinished_requests(self) -> bool:
        return bool(self._by_id)

    def has_finished_requests(self) -> bool:
        return bool(self._untold)

    def reset_prefix_cache(self) -> bool:
        return False

    def take_rejections(self) -> dict[str, Rejection]:
        rejected, self._rejected = self._rejected, {}
        return rejected

    def next_wake(self) -> float | None:
        return self._wake

    def next_expiry(self) -> float | None:
        own = self._due[0][0] if self._due else math.inf
        soonest = min(own, math.inf if self._expiry is None else self._expiry)
        return soonest if math.isfinite(soonest) else None

    def make_stats(self) -> SchedulerStats:
        running, waiting = self.get_request_counts()
        return SchedulerStats(
            num_steps=self._num_steps,
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_waiting_tokens=0,
            num_kv_blocks=self._batch.num_blocks,
            num_used_kv_blocks=self._batch.num_held,
            num_preemptions=self._num_preemptions,
            num_prefill_tokens=0,
            num_decode_tokens=0,
            num_prefix_queried_tokens=0,
            num_prefix_hit_tokens=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            policy=self._sitting.hello.name,
        )

    # How.

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _ask(self, asked: Asked, *kinds: type[Any]) -> Any:
        """Return the answer, which is of one of these kinds. Raises `Failed`, `Gone`."""
        sitting = self._sitting
        if sitting.failure is not None:
            raise sitting.failure
        with self._kept():
            sitting.line.send(_encode(asked))
            found = _answer(sitting.line.receive(), *kinds)
        if isinstance(found, Ready | Plan):
            self._expiry = found.expiry
        return found

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Keep in the sitting what fails in the block: the engine tells it in words of its own."""
        try:
            yield
        except (Failed, Gone) as error:
            self._sitting.failure = error
            raise

    def _is_due(self, request: Request, now: float) -> bool:
        """Return whether the time of a request is up."""
        patience, is_due = self._settings.queue_timeout, False
        if patience is not None and request.status is RequestStatus.WAITING:
            is_due = request.arrival_time + patience <= now
        return is_due or (request.deadline is not None and request.deadline <= now)

    def _row(self, number: int) -> Row:
        """Return an unfinished request. Raises `Failed` for a number of none."""
        if not 0 <= number < len(self._rows) or self._rows[number].has_ended:
            raise forged(f"it names request {number}, which is not there")
        return self._rows[number]

    def _end(self, row: Row, status: RequestStatus) -> str:
        request = row.request
        if request.status is not RequestStatus.WAITING:  # else the runner never heard of it
            self._untold.append(request.request_id)
        request.status = status
        row.has_ended = True
        self._batch.leave(row)
        del self._by_id[request.request_id]
        return request.request_id

    def _append(self, row: Row, token_ids: list[int]) -> EngineCoreOutput:
        """Append the token that was sampled, which may end the request."""
        request, [token_id] = row.request, token_ids
        request.token_ids.append(token_id)
        request.num_tokens += 1
        status = None
        params = request.sampling_params
        if token_id in request.stop_token_ids and request.num_output_tokens > params.min_tokens:
            status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = token_id if token_id in params.stop_token_ids else None
        elif request.num_tokens >= request.max_total_tokens:
            status = RequestStatus.FINISHED_LENGTH_CAPPED
        if status is None:
            return EngineCoreOutput(request.request_id, token_ids)
        name = self._end(row, status)
        return EngineCoreOutput(name, token_ids, status.finish_reason, request.stop_reason)

    def _take_in(self, plan: Plan) -> SchedulerOutput:
        """Return a plan as the runner takes it, made of what this end knows. Raises `Failed`."""
        if plan.wake is not None and not math.isfinite(plan.wake):
            raise forged(
                f"it wants to be asked again at {plan.wake}, which is no number of seconds"
            )
        self._wake = plan.wake
        last_rows, last_names, last_tokens = self._last
        if plan.rows is None:
            rows = last_rows
            if any(row.has_ended for row in rows):
                raise forged("it repeats a step of which a request has ended")
        else:
            rows = [self._row(number) for number in plan.rows]
            if len(set(plan.rows)) != len(rows):
                raise forged("a request has two rows in a step")
        for number, (reason, seconds) in plan.rejected.items():
            row = self._row(number)
            try:
                found = Rejection.of(self._sitting.hello.name, reason, seconds)
            except PolicyError as error:
                raise forged(str(error)) from error
            if row.stay is not None:
                raise forged(f"it rejects request {number}, which runs")
            self._rejected[row.request.request_id] = found
        preempted = [self._row(number) for number in plan.preempted]
        paused = set(plan.paused)
        if not paused <= set(plan.preempted):
            raise forged("it pauses a request that it does not take out of the batch")
        for row in preempted:
            is_paused = row.number in paused
            self._batch.take_out(row, is_paused=is_paused)
            self._num_preemptions += not is_paused
        admitted = [
            (self._row(new.request), new.num_computed, new.block_ids) for new in plan.admitted
        ]
        grown = {self._row(number): block_ids for number, block_ids in plan.grown.items()}
        before = self._batch.step(rows, plan.tokens, admitted, grown)
        tokens = plan.tokens
        if plan.rows is None and tokens is None and last_tokens:
            names, scheduled, total = last_names, last_tokens, len(rows)
        else:
            counts = [1] * len(rows) if tokens is None else tokens
            scheduled = {r.request.request_id: n for r, n in zip(rows, counts, strict=True)}
            names, total = list(scheduled), sum(counts)
            self._last = (rows, names, scheduled) if tokens is None else (rows, [], {})
        new = {row for row, _, _ in admitted}
        if new:
            names = [row.request.request_id for row in rows if row not in new]
            before = [n for n, row in zip(before, rows, strict=True) if row not in new]
            self._last = rows, [], {}
        parts: dict[str, Any] = {}
        if plan.wanted:
            try:
                wanted = check_names(plan.wanted, self._sitting.hello.name)
            except ConfigError as error:
                raise forged(str(error)) from error
            parts[ROW_VALUES] = dict.fromkeys(scheduled, wanted)
        finished, self._untold = self._untold, []
        if total:
            self._in_flight.append(rows)
        self._num_steps += 1
        return SchedulerOutput(
            step_id=plan.step_id,
            scheduled_new_reqs=[
                NewRequestData(
                    request_id=row.request.request_id,
                    token_ids=list(row.request.token_ids),
                    num_prompt_tokens=row.request.num_prompt_tokens,
                    sampling_params=row.request.sampling_params,
                    stop_token_ids=row.request.stop_token_ids,
                    block_ids=block_ids,
                    num_computed_tokens=num_computed,
                )
                for row, num_computed, block_ids in admitted
            ],
            scheduled_cached_reqs=CachedRequestData(
                names, before, {r.request.request_id: ids for r, ids in grown.items()}
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=total,
            preempted_req_ids=[row.request.request_id for row in preempted],
            finished_req_ids=finished,
            parts=parts,
            paused_req_ids=[self._rows[number].request.request_id for number in plan.paused],
        )


class GuestOfWholePrompts(GuestScheduler):
    """A guest whose policy never splits a prompt."""

    runs_whole_prompts = True


def name_of(hello: Hello) -> str:
    """Return by which name of a policy the engine of a simulation makes the scheduler."""
    kind = GuestOfWholePrompts if hello.runs_whole_prompts else GuestScheduler
    return f"{kind.__module__}:{kind.__qualname__}"
