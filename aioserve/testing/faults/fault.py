"""What goes wrong, as data, and small things around real parts that make it happen.

Around a method of any part, around a runner, in what the process is given by the system, and in an
event loop whose clock jumps ahead.
"""

import asyncio
import errno
import functools
import inspect
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.interface import NOT_FINITE, RunnerInterface
from aioserve.scheduler.output import SchedulerOutput


def planted(kind: str, where: str) -> BaseException:
    """Return what is raised; its words say that it was planted, and where, so that a log can be
    searched for them.
    """
    what = f"planted in {where}"
    errors: dict[str, BaseException] = {
        "raises": RuntimeError(what),
        "no memory": MemoryError(what),
        "cancelled": asyncio.CancelledError(what),
    }
    numbers = {"disk full": errno.ENOSPC, "no descriptors": errno.EMFILE, "reset": errno.ECONNRESET}
    if kind in numbers:
        return OSError(numbers[kind], f"{os.strerror(numbers[kind])}, {what}")
    return errors[kind]


#: What any call may do instead of what it should: raise one of these kinds, or take its time.
KINDS = ("raises", "no memory", "cancelled", "disk full", "no descriptors", "reset", "slow")
SLOW_SECONDS = 0.02


class Fault(msgspec.Struct, frozen=True):
    """`kind` happens in `part`, after that was passed `after` times more."""

    part: str
    kind: str
    after: int = 0

    def __str__(self) -> str:
        return f"{self.part}: {self.kind}"


class Faults:
    """The faults that are to come, each once, and how often each came."""

    def __init__(self) -> None:
        self._armed: list[list[int | Fault]] = []  # passes that are left, and the fault
        #: By part and kind.
        self.injected: Counter[str] = Counter()
        #: Those that came, in order.
        self.came: list[Fault] = []
        #: Ids of requests that a fault has touched, of the faults that know their requests.
        self.touched: set[str] = set()

    def arm(self, fault: Fault) -> None:
        """Let the fault come once."""
        self._armed.append([fault.after, fault])

    def disarm(self) -> None:
        """Take back the fault that was to come."""
        self._armed.clear()

    def is_armed(self, part: str) -> bool:
        """Return whether one is to come in this part."""
        return any(fault.part == part for _, fault in self._pairs())

    def comes(self, part: str) -> str | None:
        """A part is passed: the kind of fault that comes now, if one does."""
        found: str | None = None
        for entry in list(self._armed):
            left, fault = entry
            assert isinstance(fault, Fault)
            assert isinstance(left, int)
            if fault.part != part:
                continue
            if left or found is not None:
                entry[0] = max(left - 1, 0)
                continue
            found = fault.kind
            self._armed.remove(entry)
            self.injected[str(fault)] += 1
            self.came.append(fault)
        return found

    def _pairs(self) -> list[tuple[int, Fault]]:
        return [(left, fault) for left, fault in self._armed]  # type: ignore[misc]


# An event loop whose clock jumps ahead: as of a machine that was stopped, or that swaps. Knows
# timers; knows nothing about what they are for.


class JumpingLoop(asyncio.SelectorEventLoop):
    """Real time, and what `jump` adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self._ahead = 0.0

    def time(self) -> float:
        """In seconds, as of any loop."""
        return super().time() + self._ahead

    def jump(self, seconds: float) -> None:
        """Let `seconds` pass at once: all that was to happen in them is due."""
        self._ahead += seconds


# Faults around a method of any part, and in what the process is given by the system. Knows methods;
# knows nothing about what they do.


def faulty(
    faults: Faults,
    part: str,
    owner: Any,
    name: str,
    nonsense: Callable[[Any], Any] = lambda result: None,
) -> None:
    """From now on `owner.name(...)` meets the faults of `part`. Of the kind "nonsense", it returns
    what `nonsense` makes of its result. `owner` is an object, or a class whose objects it means.
    """
    method = getattr(owner, name)
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def asynchronous(*args: Any, **kwargs: Any) -> Any:
            kind = faults.comes(part)
            if kind == "slow":
                await asyncio.sleep(SLOW_SECONDS)
            elif kind not in (None, "nonsense"):
                raise planted(str(kind), part)
            result = await method(*args, **kwargs)
            return nonsense(result) if kind == "nonsense" else result

        setattr(owner, name, asynchronous)
        return

    @functools.wraps(method)
    def synchronous(*args: Any, **kwargs: Any) -> Any:
        kind = faults.comes(part)
        if kind == "slow":
            time.sleep(SLOW_SECONDS)
        elif kind not in (None, "nonsense"):
            raise planted(str(kind), part)
        result = method(*args, **kwargs)
        return nonsense(result) if kind == "nonsense" else result

    setattr(owner, name, synchronous)


def open_descriptors() -> dict[int, str]:
    """Return what this process has open, by number."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[int(entry.name)] = os.readlink(entry)
        except OSError:
            continue  # that of the listing itself
    return found


@contextmanager
def few_descriptors(spare: int = 0) -> Iterator[None]:
    """Inside the block this process may open `spare` more descriptors than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(open_descriptors()) + 1 + spare, hard))
    # Numbers below that are free as well: they are taken.
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        for number in held[:spare]:
            os.close(number)
        held = held[spare:]
    try:
        yield
    finally:
        for number in held:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# A runner that fails as runners may: it raises, hangs, is slow, or says what cannot be. Knows the
# interface; the steps that go well are the real runner's.


#: What a step may do.
RUNNER_KINDS = (
    "raises",  # when it is done
    "raises unread",  # before the real runner hears of it
    "raises at once",  # and not where its result is awaited
    "no memory",
    "cancelled",
    "slow",
    "short",  # a row of tokens is missing
    "many",  # a row has tokens that were not asked for
    "foreign",  # tokens that the model does not have
    "stranger",  # tokens for a request that is not there
    "nan",
)
HANGS = "hangs"  # the step does not come back: for engines whose watchdog ends it


class FaultyRunner:
    """A runner with faults around the steps of a real one, of any kind."""

    def __init__(self, runner: RunnerInterface, faults: Faults, part: str = "runner") -> None:
        """From now on `runner` meets the faults of `part`."""
        self._execute = runner.execute_model
        self._faults, self._part = faults, part
        runner.__dict__["execute_model"] = self

    def __call__(self, step: SchedulerOutput) -> "asyncio.Future[ModelRunnerOutput]":
        # A step that only tells of departures has no result that could be wrong.
        kind = self._faults.comes(self._part) if step.num_scheduled_tokens else None
        if kind is None:
            return self._execute(step)
        self._faults.touched.update(step.num_scheduled_tokens)
        loop = asyncio.get_running_loop()
        if kind == "raises at once":
            raise RuntimeError(f"planted in {self._part}")
        if kind in ("raises unread", HANGS):
            future: asyncio.Future[ModelRunnerOutput] = loop.create_future()
            if kind != HANGS:
                future.set_exception(RuntimeError(f"planted in {self._part}"))
            return future
        return loop.create_task(self._wrong(kind, self._execute(step)))

    async def _wrong(
        self, kind: str, step: "asyncio.Future[ModelRunnerOutput]"
    ) -> ModelRunnerOutput:
        result = await step
        if kind == "slow":
            await asyncio.sleep(SLOW_SECONDS)
            return result
        if kind in ("raises", "no memory", "cancelled"):
            raise planted(kind, self._part)
        return spoilt(kind, result)


def spoilt(kind: str, result: ModelRunnerOutput) -> ModelRunnerOutput:
    """Return a result that is wrong in one way of `RUNNER_KINDS`, in its first row."""
    tokens = [list(own) for own in result.sampled_token_ids]
    changed: dict[str, Any] = {"sampled_token_ids": tokens}
    if kind == "short":
        tokens.pop(0)
    elif kind == "many":
        tokens[0] += [1, 2, 3]
    elif kind == "foreign":
        tokens[0] = [10**9, -1][: max(len(tokens[0]), 1)]
    elif kind == "stranger":
        changed["req_ids"] = ["nobody", *result.req_ids[1:]]
    elif kind == "nan":
        tokens[0] = []
        name = result.req_ids[0]
        changed["failed"] = {name: NOT_FINITE}
        changed["logprobs"] = {key: told for key, told in result.logprobs.items() if key != name}
    return msgspec.structs.replace(result, **changed)
