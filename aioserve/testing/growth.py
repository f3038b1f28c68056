"""Whether a policy keeps something of each request that has ended: its memory grows without end.

Knows objects and their sizes. Knows nothing about what a policy keeps them for.
"""

import gc
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from aioserve.scheduler import BaseScheduler, SchedulerOutput
from aioserve.testing.bare_run import BareRun
from aioserve.testing.violation import ContractViolation
from aioserve.testing.writes import is_ours

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
    """Raise `ContractViolation` if an attribute of the policy grows with requests that have ended.
    Where one seems to after 2,000 of them, it is asked again after many more.
    """
    run = _Waves(policy, options)
    if not any(run.grown(WAVE, 3 * WAVE).values()):
        return
    for name, (before, after) in run.grown(MANY, MANY).items():
        if after - before >= MOST_BYTES * MANY:
            raise ContractViolation(
                f"{policy.__name__}: {name} grows with requests that have ended: it takes "
                f"{before:,} bytes after {run.num_served - MANY:,} of them and {after:,} after "
                f"{run.num_served:,}; what is kept of requests needs a bound, of 10,000 at most"
            )


class _Waves:
    """A policy that serves request after request."""

    def __init__(self, policy: type[BaseScheduler], options: Mapping[str, Any]) -> None:
        self.num_served = 0
        self._run = BareRun(policy, options, NUM_SEATS)

    def grown(self, first: int, more: int) -> dict[str, tuple[int, int]]:
        """Sizes in bytes after `first` requests, and after `more` of them, of what has grown."""
        before, after = self._serve(first), self._serve(more)
        return {
            name: (before.get(name, 0), size)
            for name, size in after.items()
            if size - before.get(name, 0) >= MOST_BYTES * more
        }

    def _serve(self, count: int) -> dict[str, int]:
        """Serve requests to their end; the sizes of the policy's own attributes, in bytes."""
        run, first = self._run, self.num_served
        for number in range(first, first + count):
            run.add(
                number,
                1 + number % 9,
                1 + number % 3,
                user=f"u{number % NUM_USERS}",
                priority=number % 3,
                hints={"session": f"s{number}", "program": f"p{number}"},
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
    """In bytes, by attribute of the policy and by variable of its classes and their modules."""
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
    """Bytes of an object and of all that it refers to, but for code and what is `theirs`, by id."""
    seen, line, size = set(theirs), [value], 0
    while line:
        item = line.pop()
        if id(item) in seen or isinstance(item, CODE):
            continue
        seen.add(id(item))
        size += sys.getsizeof(item)
        line += gc.get_referents(item)
    return size
