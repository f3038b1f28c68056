"""Says what a policy did wrong, and where in its own code: what its author has to look at.

Knows tracebacks and common slips. Knows nothing about the state of a scheduler.
"""

import traceback
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from aioserve.errors import FROM_OUTSIDE, AioserveError, PolicyError
from aioserve.request import Request
from aioserve.scheduler.step import Step


def find_line(error: BaseException, policy: type) -> traceback.FrameSummary | None:
    """Return the innermost line of the policy's own file that was running, over all causes of
    `error`.
    """
    frames: list[tuple[FrameType, int]] = []
    cause: BaseException | None = error
    while cause is not None:
        frames += traceback.walk_tb(cause.__traceback__)
        cause = cause.__cause__
    return _own_line(frames, policy)


def find_running_line(frame: FrameType, policy: type) -> traceback.FrameSummary | None:
    """Return the innermost line of the policy's own file on a stack whose innermost frame is
    `frame`.
    """
    return _own_line([*traceback.walk_stack(frame)][::-1], policy)


def _own_line(frames: list[tuple[FrameType, int]], policy: type) -> traceback.FrameSummary | None:
    """Return the last line of the policy's own file among frames, the outermost first."""
    methods = {
        function.__code__
        for kind in policy.__mro__
        if not kind.__module__.startswith(("aioserve.scheduler", "builtins", "abc"))
        for function in vars(kind).values()
        if hasattr(function, "__code__")
    }
    files = {code.co_filename for code in methods}
    # The code that called the policy may stand in the same file.
    called = dropwhile(lambda frame: frame[0].f_code not in methods, frames)
    own = [
        frame
        for frame in called
        if frame[0].f_code.co_filename in files
        or (
            getattr(frame[0].f_locals.get("self"), "is_part_of_policy", False)
            and not frame[0].f_globals.get("__name__", "").startswith("aioserve.scheduler")
        )
    ]
    return traceback.StackSummary.extract(iter(own[-1:]))[0] if own else None


def place(error: BaseException, policy: type) -> str:
    """`" (mine.py:12)"`; "" if no line of it was running. No folder: clients may read it."""
    line = find_line(error, policy)
    return "" if line is None else f" ({Path(line.filename).name}:{line.lineno})"


def asking(policy: Any, method: str, kind: type | None = None) -> Callable[[Request], Any]:
    """Return a method of the policy that answers a question about a request; `kind` is the type of
    its answer. What it raises, or an answer of another type, is a `PolicyError`.
    """
    name, ask = type(policy).__name__, getattr(policy, method)

    def asked(request: Request) -> Any:
        try:
            answer = ask(request)
        except FROM_OUTSIDE:
            raise
        except BaseException as error:
            raise PolicyError(
                f"policy {name} raised {error!r} in {method}(){place(error, type(policy))}"
            ) from error
        if kind is not None and not isinstance(answer, kind):
            raise PolicyError(
                f"policy {name}: {method}() must return a {kind.__name__}, got {answer!r:.80}"
            )
        return answer

    return asked


def as_policy_error(error: BaseException, policy: type, method: str) -> Exception:
    """Return what the policy raised in `method`, as an error of ours that names the line, if one of
    the policy's was running. An error of ours stays what it is.
    """
    what, where = f"policy {policy.__name__} raised {error!r} in {method}", place(error, policy)
    if isinstance(error, PolicyError):
        what = str(error)
    elif isinstance(error, AioserveError):
        return error
    wrapped = PolicyError(what if what.endswith(where) else what + where)
    wrapped.__cause__ = error
    return wrapped


class blamed:  # as `contextlib.suppress` is: cheap enough to stand around every step
    """A block in which what the policy raises is a `PolicyError` with its line; errors of ours
    pass. It may be entered any number of times.
    """

    __slots__ = ("_method", "_policy")

    def __init__(self, policy: type, method: str) -> None:
        self._policy, self._method = policy, method

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, (AioserveError, *FROM_OUTSIDE)):
            raise as_policy_error(error, self._policy, self._method) from error


def describe_result(result: Any) -> str:
    """Return what `schedule` returned in place of a plan, and what was probably meant."""
    if result is None:
        return "None (is `return step.output()` missing?)"
    if isinstance(result, Step):
        return "the step itself (return its output())"
    return f"{result!r:.100}"
