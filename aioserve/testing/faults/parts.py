"""Faults around a method of any part, and in what the process is given by the system.

Knows methods; knows nothing about what they do.
"""

import asyncio
import functools
import inspect
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aioserve.testing.faults.fault import SLOW_SECONDS, Faults, planted


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
    """What this process has open, by number."""
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
