"""What a router did wrong, in one line with the place in its own file."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aioserve.errors import FROM_OUTSIDE, AioserveError, PolicyError


class RouterError(PolicyError):
    """A router raised, or answered what is no answer; the message names it and the line."""


@contextmanager
def blamed(kind: type, method: str) -> Iterator[None]:
    """What the router, or an autoscaler, raises in the block is a `RouterError` with its line.
    Errors of ours pass.
    """
    try:
        yield
    except (AioserveError, *FROM_OUTSIDE):
        raise
    except BaseException as error:
        raise RouterError(
            f"{kind.__name__} raised {error!r} in {method}{_place(error, kind)}"
        ) from error


def _place(error: BaseException, kind: type) -> str:
    """`" (mine.py:12)"`, the innermost line of the class's own files; "" if none was running."""
    files = {
        function.__code__.co_filename
        for base in kind.__mro__
        if not base.__module__.startswith(("aioserve.routing", "builtins", "abc"))
        for function in vars(base).values()
        if hasattr(function, "__code__")
    }
    own = [f for f in traceback.extract_tb(error.__traceback__) if f.filename in files]
    return f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
