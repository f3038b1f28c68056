"""Looks for fewer and simpler calls of a harness that break the same rule in the same place.

Counts steps, not seconds, so the answer is the same on every machine. Knows calls and the prompts
of requests. Knows nothing about what a policy does with them.
"""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from aioserve.errors import ConfigError, PolicyError
from aioserve.testing.calls import Call, make_calls
from aioserve.testing.harness import SchedulerHarness
from aioserve.testing.violation import ContractViolation

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
        """Calls, and words in them."""
        calls = self.harness.calls
        words = sum(_num_words(call.arguments) for call in calls)
        return len(calls), words + _num_words(self.harness.setup)


def shrink(failure: Failure, budget: int = BUDGET) -> Failure:
    """The simplest failure of the same rule that was found before `budget` was spent."""
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
        """Whether these break the same rule, and are the simplest so far."""
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
    """How much there is to read; a number that repeats is read once."""
    if isinstance(value, Mapping):
        return sum(1 + _num_words(item) for item in value.values())
    if isinstance(value, list | tuple):
        return len(value) + len(list(groupby(value)))
    return 1
