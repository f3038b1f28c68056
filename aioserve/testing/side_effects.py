"""What a policy may not do beside its answers: write to what it reads, ask clocks, walk the heap.

Knows requests, steps, limits and parts as objects, and functions of the standard library that no
replay repeats, that block, or that lead to what nobody has given the policy.
"""

import asyncio
import datetime
import functools
import gc
import inspect
import os
import random
import secrets
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, TypeVar

from aioserve.request import Request
from aioserve.scheduler import BaseScheduler, Step
from aioserve.testing.violation import ContractViolation

T = TypeVar("T")

#: Packages of aioserve that hold what contracts look at.
OPEN = ("aioserve.policies.", "aioserve.fleet.routers.")

#: Attributes of a scheduler that its base sets, once.
FIXED = (
    *("max_num_seqs", "max_num_batched_tokens", "max_loras", "max_model_len"),
    *("kv_cache", "memory", "clock", "book"),
)


class Writes:
    """The writes of the policy since the last look, to what is not its own."""

    def __init__(self) -> None:
        self.request_type = _watched(Request, self._note_request)  # a `Request` that tells
        self._step_types: dict[type[Step], type[Step]] = {}  # that tell, by those that do not
        self._found: list[str] = []
        self._scheduler: BaseScheduler | None = None
        self._fixed: dict[str, Any] = {}

    def watch(self, scheduler: object) -> None:
        """From here on the steps of this scheduler tell, and what its base has set must stay."""
        self._scheduler = None
        if not isinstance(scheduler, BaseScheduler):
            return
        self._scheduler = scheduler
        self._fixed = {name: getattr(scheduler, name) for name in FIXED}
        new_step = scheduler.new_step

        def watched_step(*args: Any, **kwargs: Any) -> Step:
            step = new_step(*args, **kwargs)
            kind = type(step)
            if kind not in self._step_types:
                self._step_types[kind] = _watched(kind, self._note_step)
            step.__class__ = self._step_types[kind]
            return step

        scheduler.new_step = watched_step  # type: ignore[method-assign]

    def check(self, where: str) -> None:
        """Raise `ContractViolation` if there is anything."""
        for name, was in self._fixed.items() if self._scheduler is not None else ():
            now = getattr(self._scheduler, name)
            if now is not was and now != was:
                self._fixed[name] = now
                self._found.append(f"self.{name} from {was!r:.80} to {now!r:.80}")
        if self._found:
            found, self._found = self._found[0], []
            raise ContractViolation(f"{where}: the policy has changed {found}")

    def _note_request(self, request: Request, change: str) -> None:
        name, _, values = change.partition(" ")
        self._found.append(f"{name} of {request.request_id} {values}")

    def _note_step(self, step: Step, change: str) -> None:
        self._found.append(f"step.{change}")


def _watched(kind: type[T], note: Callable[[T, str], None]) -> type[T]:
    """Return the same class, of which `note` hears what code outside aioserve sets in its
    objects.
    """

    def __setattr__(self: T, name: str, value: Any) -> None:
        frame = sys._getframe(1)
        # An attribute that is not there yet is set by a copy that is being made.
        if not is_ours(frame.f_globals.get("__name__", "")) and hasattr(self, name):
            was = getattr(self, name)
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            note(self, f"{name} from {was!r:.80} to {value!r:.80} ({place})")
        object.__setattr__(self, name, value)

    return type(kind.__name__, (kind,), {"__slots__": (), "__setattr__": __setattr__})


@functools.cache
def is_ours(module: str) -> bool:
    """Return whether code of this module is aioserve's own, and no policy or router."""
    return module.startswith("aioserve.") and not module.startswith(OPEN)


# Finds calls of a policy's own code that no replay repeats or that block: clocks, dice, sleep.
# Looks at one thread through a profile function. Knows functions of the standard library. Knows
# nothing about what a policy does with what they return.


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


#: Walks through the process, in C and in Python.
WALKS: dict[Any, str] = {
    **{
        getattr(module, name): f"{module.__name__}.{name}"
        for module, names in (
            (gc, ("get_objects", "get_referrers", "get_referents")),
            (sys, ("_getframe", "_current_frames")),
            (asyncio, ("current_task", "get_running_loop", "get_event_loop")),
        )
        for name in names
    },
    **{
        function.__code__: f"{module.__name__}.{function.__name__}"
        for module, functions in (
            (asyncio, (asyncio.all_tasks,)),
            (inspect, (inspect.currentframe, inspect.stack, inspect.trace)),
            (traceback, (traceback.walk_stack, traceback.extract_stack)),
        )
        for function in functions
    },
}
#: Attributes by which code comes from an error, a generator or a frame to frames of others.
LEADS = frozenset(
    {"tb_frame", "f_back", "f_locals", "f_globals", "f_builtins", "gi_frame", "cr_frame"}
    | {"ag_frame", "cr_await", "gi_yieldfrom"}
)


@contextmanager
def watched_calls(policy: type, where: Callable[[], str], word: str = "policy") -> Iterator[None]:
    """Raise `ContractViolation` behind the block for the first call of a clock, dice or sleep that
    code of the policy's package made in it; `where` names the step, and `word` says what it is, if
    it is no policy.
    """

    def name_of(event: str, frame: FrameType, argument: Any) -> str:
        return BUILT_IN.get(argument, "") if event == "c_call" else _name(frame)

    with _heard(policy, where, name_of, lambda name, frame: _message(name, frame, word)):
        yield


@contextmanager
def watched_walks(policy: type, where: Callable[[], str]) -> Iterator[None]:
    """Raise `ContractViolation` behind the block for the first walk through objects, frames or
    tasks that code of the policy's package made in it, or names in its code.
    """

    def name_of(event: str, frame: FrameType, argument: Any) -> str:
        return WALKS.get(argument if event == "c_call" else frame.f_code, "")

    with _heard(policy, where, name_of, lambda name, frame: _found(f"calls {name}()", frame)):
        yield
    for name, code in _leads(policy):
        raise ContractViolation(f"{where()}: {_found(f'reads .{name}', code)}")


@contextmanager
def _heard(
    policy: type,
    where: Callable[[], str],
    name_of: Callable[[str, FrameType, Any], str],
    words: Callable[[str, FrameType], str],
) -> Iterator[None]:
    """Raise `ContractViolation` behind the block for the first call in it, by code of the policy's
    package, that has a name.
    """
    found: list[str] = []
    packages = {_package(kind.__module__) for kind in policy.__mro__} - {"builtins"}

    def is_policy(frame: FrameType) -> bool:
        module = frame.f_globals.get("__name__", "")
        return _package(module) in packages and not is_ours(module)

    def look(frame: FrameType, event: str, argument: Any) -> None:
        caller = frame if event == "c_call" else frame.f_back
        if event in ("call", "c_call") and (name := name_of(event, frame, argument)):
            if caller is not None and is_policy(caller):
                found.append(f"{where()}: {words(name, caller)}")

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)
        if found:
            raise ContractViolation(found[0])


def _leads(policy: type) -> Iterator[tuple[str, CodeType]]:
    """Yield what leads to frames in the code of a policy's classes and of the functions that they
    name, with the code that has it.
    """
    todo: list[Any] = [
        function
        for kind in policy.__mro__
        if not is_ours(kind.__module__)
        for function in vars(kind).values()
    ]
    seen: set[Any] = set()
    while todo:
        one = todo.pop()
        function = getattr(one, "fget", None) or getattr(one, "__func__", one)
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        codes = [function.__code__]
        for code in codes:
            codes += [const for const in code.co_consts if isinstance(const, CodeType)]
            texts = (const for const in code.co_consts if isinstance(const, str))
            for name in (*code.co_names, *texts):
                if name in LEADS:
                    yield name, code
            named = (function.__globals__.get(name) for name in code.co_names)
            todo += [n for n in named if not is_ours(getattr(n, "__module__", "") or "")]


def _found(what: str, place: FrameType | CodeType) -> str:
    code = place if isinstance(place, CodeType) else place.f_code
    line = code.co_firstlineno if isinstance(place, CodeType) else place.f_lineno
    return (
        f"the policy {what} ({Path(code.co_filename).name}:{line}): what it finds there no server "
        "tells it, and plans that depend on it are worth nothing; it has self, step and requests"
    )


def _name(frame: FrameType) -> str:
    """Return what is called, if it is one of them; else ""."""
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
