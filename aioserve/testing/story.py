"""Tells how a rule was broken: by fewer and simpler calls that break it in the same place.

On a screen: where, what waits, each request's life, and a program. Knows what a harness has seen.
Knows nothing about rules.
"""

import re
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from aioserve.errors import ConfigError, PolicyError
from aioserve.request import WaitReason
from aioserve.scheduler.blame import find_line
from aioserve.testing.calls import Call, make_calls, write_program
from aioserve.testing.harness import SchedulerHarness
from aioserve.testing.violation import ContractViolation, HashOrder, NoReturn, Starvation

#: What a scheduler that breaks a rule raises, or the harness for it.
BROKEN = (ContractViolation, PolicyError)

#: Steps and calls that a search may make: a few seconds. A guess.
BUDGET = 20_000


@dataclass(frozen=True)
class Failure:
    """A harness, and what its last call raised."""

    harness: SchedulerHarness
    error: Exception

    @cached_property
    def rule(self) -> list[tuple[type, str, int | None]]:
        """Where the error was raised, and what caused it: equal for equal faults."""
        found = []
        error: BaseException | None = self.error
        while error is not None:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            found.append((type(error), frame.filename, frame.lineno))
            error = error.__cause__
        return found

    @cached_property
    def size(self) -> tuple[int, int]:
        """How many calls the failure takes, and how many words their arguments have."""
        calls = self.harness.calls
        words = sum(_num_words(call.arguments) for call in calls)
        return len(calls), words + _num_words(self.harness.setup)


def shrink(failure: Failure, budget: int = BUDGET) -> Failure:
    """Return the simplest failure of the same rule that was found before `budget` was spent."""
    search = _Search(failure, budget)
    search.attempt(failure.harness.setup, _requests_alone(failure.harness.calls))
    while True:
        size = search.best.size
        search.drop_calls()
        search.simplify_setup()
        search.simplify_requests()
        if search.best.size == size or search.budget <= 0:
            return search.best


def _requests_alone(calls: list[Call]) -> list[Call]:
    requests = [call for call in calls if call.method == "add_request"]
    return [*requests, Call("run_until_idle", {}, 0)]


class _Search:
    """The simplest failure so far."""

    def __init__(self, failure: Failure, budget: int) -> None:
        self.best = failure
        self.budget = budget

    def attempt(self, setup: Mapping[str, Any], calls: list[Call]) -> bool:
        """Return whether these break the same rule, and are the simplest so far."""
        if self.budget <= 0:
            return False
        try:
            harness = SchedulerHarness(self.best.harness.policy, **setup)
        except ConfigError:
            return False
        try:
            make_calls(harness, calls)
        except BROKEN as error:
            found = Failure(harness, error)
        else:
            return False
        finally:
            self.budget -= len(harness.steps) + len(calls)
        if found.rule != self.best.rule or found.size >= self.best.size:
            return False
        self.best = found
        return True

    def drop_calls(self) -> None:
        """The later ones first, many at once before one by one."""
        count = len(self.best.harness.calls) // 2
        while count:
            start = len(self.best.harness.calls) - count
            while start >= 0:
                calls = self.best.harness.calls
                self.attempt(self.best.harness.setup, calls[:start] + calls[start + count :])
                start = min(start, len(self.best.harness.calls)) - count
            count //= 2

    def simplify_setup(self) -> None:
        """Leave each setting at its default."""
        calls = self.best.harness.calls
        for name in list(self.best.harness.setup):
            rest = {n: value for n, value in self.best.harness.setup.items() if n != name}
            self.attempt(rest, calls)

    def simplify_requests(self) -> None:
        """Shorter prompts of equal tokens, and no more said about them than it takes."""
        for i, call in enumerate(list(self.best.harness.calls)):
            if call.method == "add_request" and i < len(self.best.harness.calls):
                for name, value in list(call.arguments.items()):
                    if name == "prompt_token_ids":
                        self._simplify_prompt(i)
                    elif name != "request_id" and not self._change(i, name, None):
                        self._shorten(i, name, value)

    def _simplify_prompt(self, i: int) -> None:
        prompt = self._argument(i, "prompt_token_ids")
        self._change(i, "prompt_token_ids", prompt[:1] * len(prompt))
        length = 1
        while length < len(prompt):
            if self._change(i, "prompt_token_ids", self._argument(i, "prompt_token_ids")[:length]):
                return
            length *= 2

    def _shorten(self, i: int, name: str, value: Any) -> None:
        """Half of a sequence, and of that, as long as one of the halves will do."""
        while isinstance(value, tuple) and len(value) > 1:
            half = len(value) // 2
            if self._change(i, name, value[:half]) or self._change(i, name, value[half:]):
                value = self._argument(i, name)
            else:
                return

    def _argument(self, i: int, name: str) -> Any:
        return self.best.harness.calls[i].arguments[name]

    def _change(self, i: int, name: str, value: Any) -> bool:
        """Try another value for an argument of a call; None leaves it out."""
        calls = list(self.best.harness.calls)
        arguments = {**calls[i].arguments, name: value}
        if value is None:
            del arguments[name]
        calls[i] = replace(calls[i], arguments=arguments)
        return self.attempt(self.best.harness.setup, calls)


def _num_words(value: Any) -> int:
    """Return how much there is to read; a number that repeats is read once."""
    if isinstance(value, Mapping):
        return sum(1 + _num_words(item) for item in value.values())
    if isinstance(value, list | tuple):
        return len(value) + len(list(groupby(value)))
    return 1


# Tells how a rule was broken, on a screen: where, what waits, each request's life, and a program.
# Knows what a harness has seen. Knows nothing about rules.


#: Rules of which each try would take its time: what breaks them is told as it came.
SLOW = (NoReturn, HashOrder)
MAX_STORIES = 2  # requests whose story is told
MAX_LINES = 8  # of a story
MAX_WAITING = 5  # requests of which is said why they wait
MAX_PROGRAM = 20  # lines of a program that are shown whole; of longer ones, both ends

IN_WORDS = {
    WaitReason.BUDGET: "no tokens left in the step, or too few for a whole prompt",
    WaitReason.SEATS: "max_num_seqs requests run",
    WaitReason.ADAPTERS: "those that run have max_loras adapters, and not its own",
    WaitReason.BLOCKS: "its tokens do not fit the free KV blocks",
    WaitReason.LEASES: "no blocks for it are free: leases of prefixes hold some",
    WaitReason.STATES: "no slot for its state is free",
    WaitReason.WINDOWS: "its window does not fit the pool of windows",
    WaitReason.ENCODER_BUDGET: "its next image does not fit",
    WaitReason.DEADLINE: "the policy holds that it will miss its deadline",
    WaitReason.PREEMPTED: "it gave way in this very step",
    WaitReason.PAUSED: "the policy paused it, and did not ask for it since",
    WaitReason.REMOTE_KVS: "its blocks are being read",
    WaitReason.IN_FLIGHT: "a step that still has it is not back",
    WaitReason.POLICY: "the policy did not ask for it in its last step",
}


@contextmanager
def told(harness: SchedulerHarness, *, simplest: bool = True) -> Iterator[SchedulerHarness]:
    """What breaks a rule in the block is raised with its story, and the program that shows it.

    If `simplest`, of the simplest program that is found in a few seconds.
    """
    try:
        yield harness
    except BROKEN as error:
        failure = Failure(harness, error)
    else:
        return
    told = explained(failure, simplest=simplest)
    raise told from told.__cause__


def explained(failure: Failure, *, simplest: bool = True) -> Exception:
    """Return the error with the story in its notes."""
    if simplest and not isinstance(failure.error, SLOW):
        failure = shrink(failure)
    failure.error.add_note("\n".join(_tell(failure)))
    return failure.error


def _tell(failure: Failure) -> Iterator[str]:
    harness = failure.harness
    yield from _where(failure)
    if isinstance(failure.error, Starvation):
        yield from _who_waits(harness)
    for request_id in _concerned(failure)[:MAX_STORIES]:
        yield f"What happened to {request_id}:"
        yield from _cut([f"  {line}" for line in _story(harness, request_id)], MAX_LINES)
    yield ""
    yield "To reproduce:"
    yield ""
    yield from _cut(write_program(harness).splitlines(), MAX_PROGRAM)


def _where(failure: Failure) -> Iterator[str]:
    """Yield the step, and the line of the policy's own code that was running, if one was."""
    places = [f"after step {steps[-1].step_id}"] if (steps := failure.harness.steps) else []
    if re.search(r"step \d", str(failure.error)):
        places = []  # the message says it
    if line := find_line(failure.error, failure.harness.policy):
        path = Path(line.filename)
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        places.append(f"in {path}:{line.lineno}, {line.name}(): {line.line}")
    if places:
        yield ", ".join(places)


def _who_waits(harness: SchedulerHarness) -> Iterator[str]:
    reasons = harness.scheduler.get_wait_reasons()
    alive = list(harness.ledger.alive.values())
    waiting = [life for life in alive if life.request_id in reasons]
    users = Counter(life.request.user for life in waiting)
    num_running = len(alive) - len(waiting)
    by_user = ", ".join(f"{user!r} {count}" for user, count in users.most_common())
    yield f"{num_running} run, {len(waiting)} wait, by user: {by_user or 'none'}"
    for life in waiting[:MAX_WAITING]:
        reason = reasons[life.request_id]
        times = life.request.num_preemptions
        preempted = f", preempted {times} times" if times else ""
        yield (
            f"  {life.request_id} of {life.request.user!r} waits since second "
            f"{life.request.arrival_time:g} of {harness.now:g}{preempted}: {reason.value} "
            f"({IN_WORDS[reason]})"
        )
    if len(waiting) > MAX_WAITING:
        yield f"  and {len(waiting) - MAX_WAITING} more"


def _concerned(failure: Failure) -> list[str]:
    """Return the requests that the message names, in its order; none if two processes differ."""
    if isinstance(failure.error, HashOrder):
        return []
    found = {
        name: match.start()
        for name in failure.harness.requests
        if (match := re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(failure.error)))
    }
    return sorted(found, key=lambda name: found[name])


def _story(harness: SchedulerHarness, request_id: str) -> Iterator[str]:
    """Yield what the scheduler was told of the latest request of this name, and what it did with
    it.
    """
    told = [call for call in harness.calls if _names(call, request_id)]
    first = max(i for i, call in enumerate(told) if call.method == "add_request")
    events = [(call.step, _in_words(harness, call, request_id)) for call in told[first:]]
    for step in harness.steps:
        if step.step_id <= events[0][0]:
            continue
        if request_id in step.preempted_req_ids:
            is_paused = request_id in step.paused_req_ids
            events.append((step.step_id, "paused" if is_paused else "preempted"))
        num_tokens = step.num_scheduled_tokens.get(request_id)
        for data in step.scheduled_new_reqs:
            if data.request_id == request_id:
                num_cached = data.num_computed_tokens
                cached = f" after {num_cached} that are there" if num_cached else ""
                events.append((step.step_id, f"admitted, computes {_tokens(num_tokens)}{cached}"))
                num_tokens = None
        if num_tokens is not None:
            events.append((step.step_id, f"computes {_tokens(num_tokens)}"))
    yield from _merged(sorted(events, key=lambda event: event[0]))
    life = harness.ledger.lives[request_id]
    if life.finish_reason is not None:
        yield f"ended with {life.finish_reason.value!r}, its output has {_tokens(len(life.tokens))}"


def _names(call: Call, request_id: str) -> bool:
    if call.method == "add_request":
        return bool(call.arguments["request_id"] == request_id)
    asked = call.arguments.get("request_ids", ())
    return call.method == "finish" and (asked is None or request_id in asked)


def _in_words(harness: SchedulerHarness, call: Call, request_id: str) -> str:
    if call.method == "finish":
        return "is ended from outside"
    request = harness.requests[request_id]
    identity = [
        f"{name} {value!r}"
        for name in ("user", "priority", "deadline")
        if (value := getattr(request, name))
    ]
    return ", ".join(
        [
            f"added with a prompt of {_tokens(len(call.arguments['prompt_token_ids']))}",
            f"may reach {request.max_total_tokens} in all",
            *identity,
        ]
    )


def _tokens(count: int | None) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _merged(events: list[tuple[int, str]]) -> Iterator[str]:
    """Yield a line for events that are alike, step after step."""
    for text, same in groupby(events, key=lambda event: event[1]):
        steps = [step for step, _ in same]
        if not text.startswith(("computes", "admitted", "preempted", "paused")):
            yield f"{f'after step {steps[0]}' if steps[0] else 'at first'}: {text}"
        elif len(steps) == 1:
            yield f"step {steps[0]}: {text}"
        else:
            yield f"steps {steps[0]} to {steps[-1]}: {text} each"


def _cut(lines: list[str], most: int) -> list[str]:
    """Return at most `most` lines: the first and the last ones."""
    if len(lines) <= most:
        return lines
    head = most // 3
    return [*lines[:head], f"  ... {len(lines) - most + 1} lines more", *lines[head - most + 1 :]]
