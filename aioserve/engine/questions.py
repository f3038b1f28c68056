"""What is asked of an engine besides requests, and what it answers: plain data.

The server asks; the engine answers at once, or another process asks it. Knows nothing about either.
"""

from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Question(msgspec.Struct, Generic[T], frozen=True, tag=True):
    """One that is answered with a `T`, or with an `AioserveError`."""

    answer_type: ClassVar[Any] = type(None)  # T, for whoever decodes it


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a new request would be served, and if not, why."""

    cause_of_death: str | None = None  # what killed the engine
    is_draining: bool = False
    trouble: str | None = None  # what would keep it from being served now


class PolicyAndOptions(msgspec.Struct, frozen=True):
    """As they are set."""

    policy: str
    options: dict[str, Any]


class HowAreYou(Question[Health], frozen=True):
    """Answered by an engine that is dead, too."""

    answer_type = Health


class ShowMetrics(Question[bytes], frozen=True):
    """Prometheus' text, of the whole."""

    answer_type = bytes


class SwitchPolicy(Question[PolicyAndOptions], frozen=True):
    """As `AsyncEngine.switch_policy`; answered with what there was before."""

    policy: str
    options: dict[str, Any]

    answer_type = PolicyAndOptions


class ResetPrefixCache(Question[bool], frozen=True):
    """As `AsyncEngine.reset_prefix_cache`."""

    answer_type = bool


class LoadAdapter(Question[None], frozen=True):
    """As `Adapters.load`."""

    name: str
    path: str


class UnloadAdapter(Question[None], frozen=True):
    """As `Adapters.unload`."""

    name: str


class AbortElsewhere(Question[bool], frozen=True):
    """Ends a request, or a response of several, of another front end; whether there was one."""

    request_id: str

    answer_type = bool


class AdapterPaths(msgspec.Struct, frozen=True):
    """Adapters that can be asked for, by name, in the order in which they were loaded."""

    paths: dict[str, Path]
