"""Notices a policy that writes to what it may only read: requests, steps, its limits and parts.

Knows attributes and the module of the code that sets them. Knows nothing about what they mean.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from aioserve.request import Request
from aioserve.scheduler import BaseScheduler, Step
from aioserve.testing.violation import ContractViolation

T = TypeVar("T")

#: Packages of aioserve that hold what contracts look at.
OPEN = ("aioserve.policies.", "aioserve.routers.")

#: Attributes of a scheduler that its base sets, once.
FIXED = (
    *("max_num_seqs", "max_num_batched_tokens", "max_loras", "max_model_len"),
    *("kv_cache", "memory", "clock", "book"),
)


class Writes:
    """What the policy has written since the last look that is not its own."""

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
    """The same class, of which `note` hears what code outside aioserve sets in its objects."""

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
    """Whether code of this module is aioserve's own, and no policy or router."""
    return module.startswith("aioserve.") and not module.startswith(OPEN)
