"""What a policy costs: lines of Python by number of requests, and memory kept of ended ones.

Measured on a scheduler and the least that it needs to go on: no checks, no runner, every token a
zero. Lines and bytes are the same on every machine; no seconds are judged.
"""

import gc
import sys
from collections import Counter, deque
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, TypeVar

from aioserve.config import SchedulerConfig
from aioserve.errors import EngineOverloadedError
from aioserve.kv_cache import KVCacheManager
from aioserve.outputs import ModelRunnerOutput
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.scheduler import BaseScheduler, RequestQueue, SchedulerOutput
from aioserve.testing.side_effects import is_ours
from aioserve.testing.violation import ContractViolation, RouterViolation

T = TypeVar("T")

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
SECONDS = 0.01  # that a step takes


class Told(Request):
    """A request that says when it is compared, in a line: `request in some_list` is a loop in C."""

    __slots__ = ()
    __hash__ = Request.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


class BareRun:
    """One scheduler with blocks and budget for `num_seats` requests at their full length."""

    def __init__(
        self, policy: type[BaseScheduler], options: Mapping[str, Any], num_seats: int
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=num_seats,
            max_num_batched_tokens=num_seats * MAX_MODEL_LEN,
            max_loras=num_seats,
            options=dict(options),
        )
        self.now = 0.0
        make: Callable[..., BaseScheduler] = policy
        self.kv_cache = KVCacheManager(num_seats * MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE)
        self.scheduler = make(
            config, self.kv_cache, max_model_len=MAX_MODEL_LEN, clock=lambda: self.now
        )

    def add(self, number: int, num_prompt: int, num_output: int, **fields: Any) -> None:
        """Request `r<number>` with a prompt of its own, if the policy takes it."""
        prompt = [number // 50 % 50, number % 50] * num_prompt
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        spec = RequestSpec(
            f"r{number}", prompt[:num_prompt], params, arrival_time=self.now, **fields
        )
        with suppress(EngineOverloadedError):  # a policy may refuse any request
            self.scheduler.add_request(Told(spec))

    def step(self, schedule: Callable[[], SchedulerOutput] | None = None) -> dict[str, int]:
        """Plan one step, by `schedule` if it is given, and bring its result. Returns the tokens of
        each request, in their order.
        """
        scheduler = self.scheduler
        output = (schedule or scheduler.schedule)()
        for request_id in scheduler.take_rejections():
            scheduler.finish_requests(request_id, RequestStatus.FINISHED_REJECTED)
        self.now += SECONDS
        if output.num_scheduled_tokens:
            rows = list(output.num_scheduled_tokens)
            result = ModelRunnerOutput(rows, [self._sample(name) for name in rows])
            scheduler.update_from_output(output, result)
        return output.num_scheduled_tokens

    def _sample(self, request_id: str) -> list[int]:
        request = self.scheduler.get_request(request_id)
        done = request is not None and request.num_computed_tokens >= request.num_tokens
        return [0] if done else []


# How much a policy's `schedule` does for how many requests: lines of Python, not seconds. Counts
# are the same on every machine; the slowest call in seconds is kept for a report, and nothing is
# judged by it. Knows lines. Knows nothing about what a line does.


SIZES = 60, 240  # requests that run, and as many that wait
#: Lines for the second size, in those for the first: 4 in proportion, 5.4 if all are sorted, 16 for
#: every pair.
MOST_TIMES = 8
#: A line that runs more often than this for each request is judged by itself as well: walks through
#: the running requests for each one that is admitted hide behind what `admit` itself runs.
OFTEN = 20
NUM_STEPS = 12  # every second one is counted, the others are timed


@dataclass(frozen=True)
class SlowestCall:
    """The call of `schedule` that took longest, in seconds of this machine."""

    seconds: float
    num_running: int
    num_waiting: int


SLOWEST: dict[type, SlowestCall] = {}  # by policy, for the report at the end of a test run

#: Methods in C that look at a whole list, tuple or deque: one call counts as a line for each item;
#: but no `insert` of the waiting line, which moves pointers when a request is preempted.
WALKS = frozenset({"count", "index", "remove", "insert", "copy"})
WAITING_LINE = RequestQueue.__module__

#: How often each line ran, by the code that it is of, and what its calls walked through in C.
Lines = Counter[tuple[CodeType, int]]


def count_lines(call: Callable[[], T], lines: Lines, skips: Container[str] = ()) -> T:
    """Make a call and add the lines of Python that it runs to `lines`, but for those of the modules
    that it `skips`, by name, and the items of lists that it walks through by `WALKS`. Returns what
    the call returns.
    """

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_globals.get("__name__", "") in skips:
            return None
        if event in ("line", "call"):
            lines[frame.f_code, frame.f_lineno] += 1
        return trace

    def walk(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and (name := getattr(function, "__name__", "")) in WALKS:
            line = getattr(function, "__self__", None)
            if isinstance(line, list | tuple | deque):
                if name != "insert" or frame.f_globals.get("__name__") != WAITING_LINE:
                    lines[frame.f_code, frame.f_lineno] += len(line)

    before, was_profiled = sys.gettrace(), sys.getprofile()
    sys.settrace(trace)
    sys.setprofile(walk)
    try:
        return call()
    finally:
        sys.setprofile(was_profiled)
        sys.settrace(before)


def most_often(lines: Lines) -> str:
    """Return where most of the lines are, for the end of a message."""
    (code, line), count = max(lines.items(), key=lambda item: item[1])
    file = Path(code.co_filename).name
    return f"most often {file}:{line} in {code.co_name}(), {count:,} times"


def check_cost(policy: type[BaseScheduler], options: Mapping[str, Any]) -> None:
    """Raise `ContractViolation` if `schedule` does work for each pair of requests."""
    (few, few_by_line), (many, many_by_line) = (_count(policy, options, n) for n in SIZES)
    crowd = f"with {SIZES[1]} running requests and as many that wait"
    small, grown = f"with {SIZES[0]} and {SIZES[0]}", SIZES[1] // SIZES[0]
    times = many.total() / few.total()
    if times > MOST_TIMES:
        raise ContractViolation(
            f"{policy.__name__}: schedule() runs {many.total():,} lines {crowd}, and "
            f"{few.total():,} {small}: {times:.0f} times as many for {grown} times the requests; "
            f"{most_often(many)}"
        )
    for place, count in many_by_line.most_common():
        if count <= OFTEN * SIZES[1]:
            return
        if (times := count / max(few_by_line[place], 1)) > MOST_TIMES:
            code, line = place
            raise ContractViolation(
                f"{policy.__name__}: schedule() runs {Path(code.co_filename).name}:{line} in "
                f"{code.co_name}() {count:,} times {crowd}, and {few_by_line[place]:,} times "
                f"{small}: {times:.0f} times as often for {grown} times the requests"
            )


def _count(
    policy: type[BaseScheduler], options: Mapping[str, Any], size: int
) -> tuple[Lines, Lines]:
    """Return the lines of the call that runs most of them, among those of some steps in a crowd,
    and for each line how often the call ran it that ran it most.
    """
    run = BareRun(policy, options, size)
    for number in range(2 * size):
        run.add(
            number,
            3 + number % 5,
            6 + number % 23,
            user=f"u{number % (size // 4)}",
            priority=(7 * number) % 3,
            hints={"session": f"s{number % (size // 2)}"},
        )
    worst, by_line = Lines(), Lines()
    for number in range(NUM_STEPS):
        lines, schedule = Lines(), run.scheduler.schedule
        run.step(_timed(run.scheduler) if number % 2 else partial(count_lines, schedule, lines))
        worst = max(worst, lines, key=Counter.total)
        by_line |= lines
    return worst, by_line


def _timed(scheduler: BaseScheduler) -> Callable[[], SchedulerOutput]:
    def schedule() -> SchedulerOutput:
        counts = scheduler.get_request_counts()
        begin = perf_counter()
        output = scheduler.schedule()
        call = SlowestCall(perf_counter() - begin, *counts)
        policy = type(scheduler)
        if policy not in SLOWEST or call.seconds > SLOWEST[policy].seconds:
            SLOWEST[policy] = call
        return output

    return schedule


# Whether a policy keeps something of each request that has ended: its memory grows without end.
# Knows objects and their sizes. Knows nothing about what a policy keeps them for.


WAVE = 500  # requests; those of a wave have ended before the next comes
#: Requests after which a policy that seems to grow may hold as much as it ever does: what it
#: bounds, it bounds to 10,000 entries or fewer.
MANY = 12_000
NUM_SEATS = 50
NUM_USERS = 5  # clients that come again; each conversation is of one request
REST_SECONDS = 3600.0  # between waves: what is kept for a time may go
MOST_BYTES = 8  # per request: a pointer
CODE = (ModuleType, type, FunctionType, BuiltinFunctionType, CodeType)


def check_memory(policy: type[BaseScheduler], options: Mapping[str, Any]) -> None:
    """Raise `ContractViolation` if an attribute of the policy grows with requests that have ended,
    of a few clients, or with clients and classes, of which each comes once. Where one seems to
    after 2,000 of them, it is asked again after many more.
    """
    for num_users, what in ((NUM_USERS, "requests"), (None, "clients")):
        run = _Waves(policy, options, num_users)
        for name, (before, after) in kept(run.serve).items():
            raise ContractViolation(
                f"{policy.__name__}: {name} grows with {what} that have ended: it takes "
                f"{before:,} bytes after {run.num_served - MANY:,} of them and {after:,} after "
                f"{run.num_served:,}; what is kept of {what} needs a bound, of 10,000 at most"
            )


def kept(serve: Callable[[int], dict[str, int]]) -> dict[str, tuple[int, int]]:
    """Return what grows with requests that have ended: bytes before and after `MANY` of them, by
    name. `serve` serves a number of requests and returns the sizes of all that is kept. Where
    nothing seems to grow after a few, no more are served.
    """

    def grown(first: int, more: int) -> dict[str, tuple[int, int]]:
        before, after = serve(first), serve(more)
        return {
            name: (before.get(name, 0), size)
            for name, size in after.items()
            if size - before.get(name, 0) >= MOST_BYTES * more
        }

    return grown(MANY, MANY) if grown(WAVE, 3 * WAVE) else {}


class _Waves:
    """A policy that serves request after request."""

    def __init__(
        self, policy: type[BaseScheduler], options: Mapping[str, Any], num_users: int | None
    ) -> None:
        """`num_users` clients come again; None: each request is of a new client and class."""
        self.num_served = 0
        self._num_users = num_users
        self._run = BareRun(policy, options, NUM_SEATS)

    def serve(self, count: int) -> dict[str, int]:
        """Serve requests to their end; the sizes of the policy's own attributes, in bytes."""
        run, first = self._run, self.num_served
        for number in range(first, first + count):
            run.add(
                number,
                1 + number % 9,
                1 + number % 3,
                user=f"u{number % self._num_users if self._num_users else number}",
                priority=number % 3,
                hints={
                    "session": f"s{number}",
                    "program": f"p{number}",
                    **({} if self._num_users else {"slo_class": f"c{number}"}),
                },
            )
            if number % NUM_SEATS == NUM_SEATS - 1:
                for _ in range(8):
                    run.step()
        self._finish()
        run.now += REST_SECONDS
        self.num_served += count
        run.add(-self.num_served, 2, 1)  # so that the policy is asked once more
        self._finish()
        return _sizes(run.scheduler)

    def _finish(self) -> None:
        for _ in range(10 * WAVE):
            if not self._run.scheduler.has_requests():
                break
            self._run.step()


class _Plain(BaseScheduler):
    def schedule(self) -> SchedulerOutput:
        return self.new_step().output()


def _sizes(scheduler: BaseScheduler) -> dict[str, int]:
    """Return bytes by attribute of the policy and by variable of its classes and their modules."""
    shared = vars(BareRun(_Plain, {}, 1).scheduler).keys()  # that every policy has
    found = {f"self.{n}": value for n, value in vars(scheduler).items() if n not in shared}
    for kind in type(scheduler).__mro__:
        if not is_ours(kind.__module__) and kind is not object:
            found |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items()}
            module = vars(sys.modules[kind.__module__])
            found |= {name: value for name, value in module.items() if not name.startswith("__")}
    theirs = {id(vars(scheduler)[name]) for name in shared} | {id(scheduler), id(vars(scheduler))}
    return {name: size_of(value, theirs) for name, value in found.items()}


def size_of(value: object, theirs: set[int]) -> int:
    """Return bytes of an object and of all that it refers to, but for code and what is `theirs`, by
    id.
    """
    seen, line, size = set(theirs), [value], 0
    while line:
        item = line.pop()
        if id(item) in seen or isinstance(item, CODE):
            continue
        seen.add(id(item))
        size += sys.getsizeof(item)
        line += gc.get_referents(item)
    return size


# Whether a policy remembers what it must forget: of a request whose id comes again, and, in its
# class, of another engine.


NUM_PASTS = 12  # requests that come, and of which every third leaves before its end


def check_forgets_ids(policy: type[BaseScheduler], options: Mapping[str, Any]) -> None:
    """Raise `ContractViolation` if requests are served otherwise because of ids that come again."""
    plans = []
    for first_ids in ("r", "q"):
        run = BareRun(policy, options, NUM_PASTS // 4)
        _serve_some(run, first_ids, 0)
        run.now += REST_SECONDS
        plans.append(_serve_some(run, "r", 1))
    for number, (again, anew) in enumerate(zip(*plans, strict=False), start=1):
        if again != anew:
            raise ContractViolation(
                f"{policy.__name__}: step {number} gives {again} tokens to requests whose ids were "
                f"those of ended ones, and {anew} to the same requests otherwise: what is kept by "
                "request id has to go in on_finish(), since an id may come again"
            )


def _serve_some(run: BareRun, ids: str, wave: int) -> list[dict[str, int]]:
    """Serve some requests, which come in the opposite order in the second wave, and of which every
    third is aborted; what each step gave to each.
    """
    plans = []
    for place in range(NUM_PASTS):
        number = NUM_PASTS - 1 - place if wave else place
        name = f"{ids}{number:02}"
        params = SamplingParams(max_tokens=3 + (number + wave) % 7, ignore_eos=True)
        spec = RequestSpec(
            name,
            [40 + wave, number] * (1 + (number + wave) % 5),
            params,
            arrival_time=run.now,
            priority=(number + wave) % 3,
            user=f"u{(number + wave) % 4}",
            hints={"session": f"s{wave}-{number}"},
        )
        with suppress(EngineOverloadedError):
            run.scheduler.add_request(Told(spec))
        if place % 3 == 2:
            run.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            plans.append(run.step())
        run.now += SECONDS
    for _ in range(100 * NUM_PASTS):
        if not run.scheduler.has_requests():
            break
        plans.append(run.step())
    return plans


def check_shares_nothing(policy: type[BaseScheduler], options: Mapping[str, Any]) -> None:
    """Raise `ContractViolation` if serving requests changes a container of the policy's classes or
    of their modules, which all engines of a process share.
    """
    BareRun(policy, options, 4)  # what a class keeps from its first instance on may stay
    before = _shared(policy)
    run = BareRun(policy, options, NUM_PASTS // 4)
    _serve_some(run, "r", 0)
    for name, now in _shared(policy).items():
        if before.get(name, now) != now:
            raise ContractViolation(
                f"{policy.__name__}: {name} has changed from {before[name]:.80} to {now:.80} while "
                "requests were served: all engines of a process share it; what belongs to one "
                "engine is set in __init__, on self"
            )


def _shared(policy: type[BaseScheduler]) -> dict[str, str]:
    """Return what the containers of the policy's classes and modules hold, in words, by name."""
    found: dict[str, Any] = {}
    for kind in policy.__mro__:
        if not is_ours(kind.__module__) and kind is not object:
            module = vars(sys.modules[kind.__module__])
            found |= {f"{kind.__module__}.{name}": value for name, value in module.items()}
            found |= {f"{kind.__name__}.{name}": value for name, value in vars(kind).items()}
    return {
        name: repr(value)
        for name, value in found.items()
        if isinstance(value, dict | list | set | deque) and "__" not in name
    }


# What a router or an autoscaler takes, by the number of replicas.


FLEETS = 100, 1000  # replicas
#: Lines of Python for the second size, by those for the first: 10 in proportion, 15 if all are
#: sorted, 100 for every pair.
MOST_GROWTH = 20
#: Lines of Python per replica of the larger fleet: several passes over all of them.
MOST_PER_REPLICA = 60


def check_fleet_cost(name: str, what: str, count: Callable[[int], Lines]) -> None:
    """Raise `RouterViolation` if `what` the router or autoscaler of this name does runs more lines
    than in proportion to the replicas; `count` returns those for a number of replicas.
    """
    few, many = map(count, FLEETS)
    times, per_replica = many.total() / max(few.total(), FLEETS[0]), many.total() / FLEETS[1]
    if times > MOST_GROWTH or per_replica > MOST_PER_REPLICA:
        raise RouterViolation(
            f"{name}: {what} runs {many.total():,} lines with {FLEETS[1]:,} replicas and "
            f"{few.total():,} with {FLEETS[0]}: at most {MOST_GROWTH} times as many and "
            f"{MOST_PER_REPLICA} a replica are allowed; {most_often(many)}"
        )


def sizes_of_own(made: object, shared: Container[str]) -> dict[str, int]:
    """Return the bytes behind each attribute of `made` whose name is not in `shared`, without
    what the shared ones hold as well.
    """
    held = vars(made)
    theirs = {id(value) for name, value in held.items() if name in shared} | {id(made), id(held)}
    return {name: size_of(value, theirs) for name, value in held.items() if name not in shared}
