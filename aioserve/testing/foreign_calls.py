"""Finds calls of a policy's own code that no replay repeats or that block: clocks, dice, sleep.

Looks at one thread through a profile function. Knows functions of the standard library. Knows
nothing about what a policy does with what they return.
"""

import datetime
import os
import random
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from aioserve.testing.violation import ContractViolation
from aioserve.testing.writes import is_ours

_CLOCKS = (
    *("time", "monotonic", "perf_counter", "process_time", "thread_time"),
    *("time_ns", "monotonic_ns", "perf_counter_ns", "process_time_ns", "thread_time_ns"),
    *("localtime", "gmtime", "ctime"),
)
#: Functions in C, with their names.
BUILT_IN: dict[Any, str] = {
    **{getattr(time, name): f"time.{name}" for name in _CLOCKS},
    time.sleep: "time.sleep",
    datetime.datetime.now: "datetime.now",
    datetime.datetime.utcnow: "datetime.utcnow",
    random.random: "random.random",
    random.getrandbits: "random.getrandbits",
    os.urandom: "os.urandom",
}
#: Functions in Python, by their code.
WRITTEN = {
    function.__code__: f"{module.__name__}.{function.__name__}"
    for module, functions in (
        (uuid, (uuid.uuid1, uuid.uuid4)),
        (secrets, (secrets.token_bytes, secrets.token_hex, secrets.randbelow)),
    )
    for function in functions
}
#: The generator behind the functions of the module `random`, which all of a process share.
SHARED_DICE = random.random.__self__  # type: ignore[attr-defined]


@contextmanager
def watched_calls(policy: type, where: Callable[[], str], word: str = "policy") -> Iterator[None]:
    """Raise `ContractViolation` behind the block for the first such call that code of the policy's
    package made in it; `where` names the step, and `word` says what it is, if it is no policy.
    """
    found: list[str] = []
    packages = {_package(kind.__module__) for kind in policy.__mro__} - {"builtins"}

    def is_policy(frame: FrameType) -> bool:
        module = frame.f_globals.get("__name__", "")
        return _package(module) in packages and not is_ours(module)

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            if argument in BUILT_IN and is_policy(frame):
                found.append(f"{where()}: {_message(BUILT_IN[argument], frame, word)}")
        elif event == "call" and (name := _name(frame)) and (caller := frame.f_back):
            if is_policy(caller):
                found.append(f"{where()}: {_message(name, caller, word)}")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
        if found:
            raise ContractViolation(found[0])


def _name(frame: FrameType) -> str:
    """What is called, if it is one of them; else ""."""
    if frame.f_code.co_filename == random.__file__:
        dice = frame.f_locals.get("self")
        is_shared = dice is SHARED_DICE or isinstance(dice, random.SystemRandom)
        return f"random.{frame.f_code.co_name}" if is_shared else ""
    return WRITTEN.get(frame.f_code, "")


def _package(module: str) -> str:
    return module.partition(".")[0]


def _message(name: str, frame: FrameType, word: str) -> str:
    again = "wake_at()" if word == "policy" else "Wait"
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    why = (
        f"every request waits while it sleeps; {again} has it asked again at a time"
        if name == "time.sleep"
        else "a replay decides otherwise; time is self.clock(), dice are a random.Random(seed)"
    )
    return f"the {word} calls {name}() ({place}): {why}"
