"""The calls that a harness got, kept so that they can be made again, or written as a program.

Knows methods and arguments. Knows nothing about rules, requests or schedulers.
"""

import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import groupby
from typing import Any, Protocol, TypeVar, cast

from aioserve.config import SchedulerConfig
from aioserve.errors import ConfigError, EngineOverloadedError, PolicyError, RequestError

Method = TypeVar("Method", bound=Callable[..., Any])

#: What the door of a scheduler may raise, or a switch of the policy; the harness checks that
#: nothing remains.
REFUSALS = (ConfigError, EngineOverloadedError, RequestError)
LINE_LENGTH = 100


@dataclass(slots=True)
class Call:
    """One call of a harness from outside, not of one of its methods by another."""

    method: str
    arguments: dict[str, Any]
    step: int  # steps planned before it
    refusal: str = ""  # the error that the scheduler's door raised


class Harness(Protocol):
    """The part of a harness that this module needs."""

    policy: type[Any]
    setup: dict[str, Any]  # what it was made with, besides the policy
    config: SchedulerConfig
    calls: list[Call]
    is_in_call: bool
    steps: list[Any]  # that were planned
    tolerates_errors: bool

    @property
    def num_in_flight(self) -> int:
        """Steps that are planned and not received."""


def kept(method: Method) -> Method:
    """Return a method of the harness whose calls from outside are kept in `calls`."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def call(self: Harness, /, *args: Any, **kwargs: Any) -> Any:
        if self.is_in_call:
            return method(self, *args, **kwargs)
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        arguments |= arguments.pop("fields", {})
        for name, value in arguments.items():
            arguments[name] = list(value) if isinstance(value, list) else value
        self.calls.append(Call(method.__name__, arguments, len(self.steps)))
        self.is_in_call = True
        try:
            return method(self, *args, **kwargs)
        except refusals(self) as error:
            self.calls[-1].refusal = type(error).__name__
            raise
        finally:
            self.is_in_call = False

    return cast(Method, call)


def refusals(harness: Harness) -> tuple[type[Exception], ...]:
    """Return what a call of this harness may raise that breaks no rule."""
    return (*REFUSALS, PolicyError) if harness.tolerates_errors else REFUSALS


def make_calls(harness: Harness, calls: Iterable[Call]) -> None:
    """Make the calls on a new harness, except those that are impossible in its state."""
    for call in calls:
        if _is_possible(harness, call.method):
            with suppress(*refusals(harness)):
                getattr(harness, call.method)(**call.arguments)


def with_other_ends(calls: Iterable[Call]) -> list[Call]:
    """Return the same calls with the lengths of replies dealt out in reverse: each reply, which is
    all one token but for its last, which ends it, gets the length of its opposite in the order of
    arrival.
    """
    calls = list(calls)
    lengths = iter([len(c.arguments["reply"]) for c in reversed(calls) if "reply" in c.arguments])
    found = []
    for call in calls:
        if "reply" in call.arguments:
            first, last = call.arguments["reply"][0], call.arguments["reply"][-1]
            reply = [first] * (next(lengths) - 1) + [last]
            call = replace(call, arguments={**call.arguments, "reply": reply})
        found.append(call)
    return found


def _is_possible(harness: Harness, method: str) -> bool:
    if method in ("receive", "fail_steps"):
        return harness.num_in_flight > 0
    if method in ("plan", "schedule", "discard_step"):
        return harness.num_in_flight < harness.config.depth
    return True


def write_program(harness: Harness, calls: Iterable[Call] | None = None) -> str:
    """Return the calls of a harness, or `calls`, as a program that anybody can run."""
    policy, used = harness.policy, {"from aioserve.testing import SchedulerHarness"}
    begin = [""]
    module = inspect.getmodule(policy)
    if module is not None and module.__name__.startswith("aioserve_policy_"):  # from a file
        used.add("from aioserve.scheduler import load_policy")
        spec = f"{module.__file__}:{policy.__qualname__}"
        begin.append(f"{policy.__name__} = load_policy({spec!r})")
    else:
        used.add(_import(policy))
    lines = [_call("harness = SchedulerHarness", [policy.__name__], harness.setup, used)]
    for call in harness.calls if calls is None else calls:
        arguments = dict(call.arguments)
        first = [
            _literal(arguments.pop(name), used)
            for name in ("request_id", "prompt_token_ids")
            if name in arguments
        ]
        line = _call(f"harness.{call.method}", first, arguments, used)
        if call.refusal:
            used.add("from contextlib import suppress")
            used.add(f"from aioserve.errors import {call.refusal}")
            line = f"with suppress({call.refusal}): {line}"
        lines.append(line)
    return "\n".join([*sorted(used), *begin, *_without_repeats(lines)])


def _import(kind: Any) -> str:
    return f"from {kind.__module__} import {kind.__name__}"


def _call(function: str, first: list[str], arguments: Mapping[str, Any], used: set[str]) -> str:
    words = first + [f"{name}={_literal(value, used)}" for name, value in arguments.items()]
    line = f"{function}({', '.join(words)})"
    if len(line) <= LINE_LENGTH:
        return line
    return "\n".join([f"{function}(", *(f"    {_folded(word)}," for word in words), ")"])


def _folded(word: str) -> str:
    """Return a list of numbers that is too long, in several lines."""
    if '"' in word or "'" in word:
        return word  # a text is not to be cut
    return textwrap.fill(word, LINE_LENGTH - 5, subsequent_indent=" " * 8)


def _literal(value: Any, used: set[str]) -> str:
    """Source text of the value; what has to be imported for it goes to `used`."""
    if isinstance(value, Enum):
        used.add(_import(type(value)))
        return f"{type(value).__name__}.{value.name}"
    if callable(value):
        if not value.__module__.startswith("aioserve_policy_"):  # from a file: loaded above
            used.add(_import(value))
        return str(value.__name__)
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        runs = [(number, len(list(same))) for number, same in groupby(value)]
        if len(runs) <= 4:
            words = (f"[{n}] * {times}" if times > 2 else str([n] * times) for n, times in runs)
            return " + ".join(words)
    if isinstance(value, list | tuple):
        items = ", ".join(_literal(item, used) for item in value)
        if isinstance(value, list):
            return f"[{items}]"
        return f"({items},)" if len(value) == 1 else f"({items})"
    if not isinstance(value, str | int | float | bool | bytes | dict | None):
        used.add(_import(type(value)))
    return repr(value)


def _without_repeats(lines: Iterable[str]) -> Iterator[str]:
    for line, repeats in groupby(lines):
        count = len(list(repeats))
        if count == 1 or "\n" in line:
            yield from [line] * count
        else:
            yield f"for _ in range({count}): {line}"
