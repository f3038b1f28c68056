"""Stands around calls of a policy: an error in one, and one that takes too long, is its fault.

Knows errors and the line that raised them. Knows nothing about requests or steps.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aioserve.errors import AioserveError, PolicyError
from aioserve.scheduler.blame import place
from aioserve.testing.time_limit import OutOfTime, begin_call, end_call
from aioserve.testing.violation import ContractViolation, NoReturn


class Guard:
    """Turns what a call of the policy raises into a `ContractViolation`."""

    def __init__(self, call_seconds: float, where: Callable[[], str]) -> None:
        """A call may take `call_seconds` of real time; `where` is the step that is named."""
        self._call_seconds = call_seconds
        self._where = where

    @contextmanager
    def blame(self, policy: type, method: str) -> Iterator[None]:
        """An exception that is no message of ours is the scheduler's fault."""
        try:
            with self.timed(policy, method):
                yield
        except (AioserveError, ContractViolation) as error:
            cause = error.__cause__
            is_door = method == "add_request"
            if is_door or not isinstance(error, PolicyError) or cause is None:
                raise
            if isinstance(cause, AioserveError):  # it says itself what is wrong
                raise cause from cause.__cause__
            raise ContractViolation(
                f"{self._where()}: {policy.__name__} raised {cause!r} in {method}()"
            ) from cause
        except Exception as error:
            raise ContractViolation(
                f"{self._where()}: {policy.__name__} raised {error!r} in {method}()"
            ) from error

    @contextmanager
    def timed(self, policy: type, method: str) -> Iterator[None]:
        """What the policy is asked in the block has so long, and then breaks the contract."""
        call = begin_call(self._call_seconds)
        ended_by: BaseException | None = None
        try:
            yield
        except (OutOfTime, KeyboardInterrupt) as error:
            if not call.was_ended:
                raise
            ended_by = error
        finally:
            end_call(call)
        if call.was_ended:  # also one that swallowed what ended it
            where = "" if ended_by is None else place(ended_by, policy)
            raise NoReturn(
                f"{self._where()}: {policy.__name__} did not come back from {method}() in "
                f"{self._call_seconds:g} s{where}"
            ) from ended_by
