"""Every error that aioserve raises on purpose.

    AioserveError
    ├── RequestError            the request is wrong: HTTP 400
    │   ├── RequestIdInUseError a request of that id is not over: HTTP 409
    │   ├── UnknownModelError   neither the model nor an adapter has that name: HTTP 404
    │   ├── UnknownAdapterError there is no adapter at that path: HTTP 404
    │   ├── UnknownKeyError     no key, or one that the server does not know: HTTP 401
    │   └── ForbiddenError      more than its key allows: HTTP 403
    ├── EngineOverloadedError   the waiting queue is full: HTTP 429 with Retry-After
    │   ├── EnginePausedError   an operator has paused the engine: HTTP 503 with Retry-After
    │   └── KeyLimitError       its key has as much as it may have for now: HTTP 429
    ├── RequestFailedError      the step that served this request raised: HTTP 500
    │   └── GrammarLimitError   its grammar needs more than it may have: HTTP 400
    ├── RequestTimeoutError     its time was up before there was anything to tell: HTTP 408
    ├── PromptsFailedError      some of many prompts got an error: `results` has the other texts
    ├── RequestAbortedError     it was aborted before there was anything to tell: HTTP 400
    ├── EngineDeadError         the engine stopped, is draining or never started: HTTP 503
    │   └── EngineUnavailableError  a server loads, drains or is not there: `retry_after` says when
    ├── EngineStartError        an engine was started twice, or after its end, or ended meanwhile
    ├── ForeignLoopError        an engine was called from a thread or event loop that is not its own
    ├── PolicyError             a scheduler policy broke a rule of the scheduler interface
    │   └── StalledError        it has scheduled no request for too long although some wait
    ├── InvariantError          aioserve's own books do not add up: a bug, or private state was used
    ├── WorkerError             the processes in front of the engine do not stay alive
    ├── RunnerDeadError         the model runner cannot run another step; the engine ends
    └── ConfigError             the process cannot start as configured
        ├── SettingError        a setting has a value that it cannot have
        └── UnknownPolicyError  no policy of that name

A message says what is wrong, what would be right, and where.
"""

import re
from collections.abc import Iterable, Sequence
from inspect import unwrap
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from aioserve.outputs import FinishedOutput

MAX_WORDS = 300  # characters of what a library says
#: What msgspec raises for what it cannot read: bytes that are no UTF-8, and too many brackets, as
#: Python itself tells of them.
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)


def one_line(error: BaseException) -> str:
    """Return what an error says, without its line breaks. A `KeyError` says a key and no more."""
    if isinstance(error, KeyError) and len(str(error).split()) == 1:
        return f"nothing is known by the name {error}"
    return " ".join(str(error).split()) or type(error).__name__


def first_line(text: str) -> str:
    """Return what a library says of an error, with where it is, if it says so; not all that it
    quotes.
    """
    lines = text.splitlines() or [""]
    return lines[0][:MAX_WORDS]


def place_of(kind: type, name: str) -> str:
    """Return where a class, or a base class of it, defines a method, for a message to its author:
    `" (mine.py:12)"`; "" if that is not Python. No folder: clients may read it.
    """
    code = getattr(unwrap(getattr(kind, name, None) or kind), "__code__", None)
    return "" if code is None else f" ({Path(code.co_filename).name}:{code.co_firstlineno})"


class CallInterrupted(BaseException):
    """Another thread ends a call that takes too long; no `Exception`, so that what is called does
    not take it for one of its own.
    """


#: What comes from outside while a policy runs. All else that it raises is its failure, `SystemExit`
#: and `asyncio.CancelledError` included: its methods run within the engine task, whose end is not
#: a policy's to ask for.
FROM_OUTSIDE = (KeyboardInterrupt, GeneratorExit, CallInterrupted)


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust has panicked. pyo3, by which it is called, tells of that by
    a `BaseException` which no module exports; it ends the call alone.
    """
    return type(error).__name__ == "PanicException" and not isinstance(error, Exception)


class AioserveError(Exception):
    """Base of all errors raised on purpose."""

    #: Of one that a server has answered with: what finds the line in its log.
    request_id: str | None = None


class RequestError(AioserveError):
    """A request that cannot be served as it is. `param` names the offending field, if one is."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RequestIdInUseError(RequestError):
    """The id belongs to a request, or to a sample of one, that is not over."""

    def __init__(self, message: str, param: str | None = "request_id") -> None:
        super().__init__(message, param)


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    @classmethod
    def of(cls, name: str, served: Iterable[str]) -> "UnknownModelError":
        """Make the error in the words that are the same everywhere."""
        known = ", ".join(map(repr, served))
        return cls(f"model {name!r} does not exist; this server has {known}", param="model")


class UnknownAdapterError(RequestError):
    """Raised for a path without an adapter."""


class UnknownKeyError(RequestError):
    """The server wants a key, and the request has no key, or one that it does not know."""


class ForbiddenError(RequestError):
    """The key is known, and is not for what was asked with it."""


class EngineOverloadedError(AioserveError):
    """The waiting queue is full. `retry_after` is a guess in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestRejectedError(EngineOverloadedError):
    """The policy has rejected the request, for a reason of its own, before any work on it."""


class EnginePausedError(EngineOverloadedError):
    """An operator has paused the engine, and wants new requests refused."""


class TemplateStalledError(EngineOverloadedError):
    """The process that renders chat templates stood still, and was ended: the next one is new."""


class KeyLimitError(EngineOverloadedError):
    """There is room, but not for the key that the request came with: others are served."""


class EngineStartError(AioserveError):
    """An engine was started a second time, or after its end: it has one life. Or the process of an
    `EngineProcess` ended before it served.
    """


class ForeignLoopError(AioserveError):
    """An engine was called from a thread or event loop that is not the one of its start."""


class RequestFailedError(AioserveError):
    """The forward pass that carried this request raised; other requests may go on."""


class GrammarLimitError(RequestFailedError):
    """The reply has come to where its grammar needs more time or memory than it may have."""

    #: How a runner's words begin for a request that ends so.
    WORDS = "structured_outputs cannot be followed further: "

    @classmethod
    def of(cls, reason: str) -> RequestFailedError:
        """Return the error for a request that cannot go on, for a `reason` in a runner's words."""
        return cls(reason) if reason.startswith(cls.WORDS) else RequestFailedError(reason)


class RequestTimeoutError(AioserveError):
    """The time that the request gave itself has passed, and what there is of it is of no use."""


class RequestAbortedError(AioserveError):
    """The request was ended from outside, and what there is of it is of no use."""


class PromptsFailedError(AioserveError):
    """Of many prompts that were asked together, some got an error. `__cause__` is the first one.

    `results` has an entry per prompt, in their order: the `FinishedOutput` with its whole text, or
    the error. `errors` are the latter alone, by the number of their prompt, from 0.
    """

    def __init__(self, results: "Sequence[FinishedOutput | AioserveError]") -> None:
        self.results = list(results)
        self.errors = {i: r for i, r in enumerate(results) if isinstance(r, AioserveError)}
        number, first = next(iter(self.errors.items()))
        super().__init__(
            f"{len(self.errors)} of {len(self.results)} prompts failed; number {number}, counted "
            f"from 0: {first}"
        )


class EngineDeadError(AioserveError):
    """The engine has stopped, is shutting down, or was not started. `__cause__` says why."""


class EngineUnavailableError(EngineDeadError):
    """A server cannot be reached, loads or drains. `retry_after` is a guess in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PolicyError(AioserveError):
    """A policy broke a rule; the message names the policy and the rule."""


class StalledError(PolicyError):
    """A policy has scheduled no request for too long, although some wait and nothing runs."""


class InvariantError(AioserveError):
    """What must always hold does not: a bug of ours, or of code that reached into private state."""


class RunnerDeadError(AioserveError):
    """The runner lost what it needs (device context, thread): no further step can run."""


class WorkerError(AioserveError):
    """A worker ends again and again before it serves: the server cannot go on."""


class ConfigError(AioserveError):
    """The configuration cannot work; said before anything starts."""


class NoAdapterError(ConfigError):
    """A file of an adapter is missing: there is none at that path."""


class SettingError(ConfigError):
    """The value of a setting has the wrong type, or is out of range. `setting` is its dotted name,
    `why` says what was expected, and `where` is the file with the value, or None without one.
    """

    def __init__(self, where: str | None, setting: str, why: str) -> None:
        super().__init__(f"{where or 'settings'}: {setting}: {why}")
        self.where = where
        self.setting = setting
        self.why = why


class UnknownPolicyError(ConfigError):
    """No policy of that name is installed."""


#: What people call the choice of one card of several, which is not a setting.
_CARDS = re.compile(r"(?:--)?(?:gpu|cuda|device)[-_]ids?|(?:--)?gpu|cuda:\d+")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean 'policy'?)"`, or nothing if no known name is like it."""
    from difflib import get_close_matches as nearest

    if _CARDS.fullmatch(name):
        return " (which card is used, CUDA_VISIBLE_DEVICES in the environment says)"
    return next((f" (did you mean {near!r}?)" for near in nearest(name, [*known], n=1)), "")
