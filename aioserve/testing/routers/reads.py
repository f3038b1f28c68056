"""What a router reads of replicas without asking for it, and what it calls that no run repeats.

Looks at compiled code, and at calls while it decides. Knows no decision.
"""

from collections.abc import Iterator
from types import CodeType
from typing import Any

from aioserve.routing import REPORTED, load_router
from aioserve.testing import seam_hashes
from aioserve.testing.foreign_calls import watched_calls
from aioserve.testing.routers.subject import RouterSubject
from aioserve.testing.violation import RouterViolation

PREFIXES = {"prefixes", "block_hashes", "block_size"}


def check_reads(subject: RouterSubject) -> None:
    """A router states `uses_reports` or `uses_prefixes` if its code reads what these bring."""
    kind = subject.kind
    names = {name for code in _own_code(kind) for name in code.co_names}
    for flag, needed in (("uses_reports", REPORTED), ("uses_prefixes", PREFIXES)):
        read = sorted(names & needed)
        if read and not getattr(kind, flag):
            raise RouterViolation(
                f"{subject.name} reads {', '.join(read)}, which nothing fills without "
                f"`{flag} = True` in the class"
            )


def check_foreign_calls(subject: RouterSubject) -> None:
    """No clock, dice or sleep but the router's own."""
    with watched_calls(subject.kind, lambda: subject.name, "router"):
        answers(subject)


def check_hash_order(subject: RouterSubject) -> None:
    """The same events give the same answers where strings have other hashes."""
    seam_hashes.check_hash_order(subject.kind, subject.options, "router", __name__)


def answers_of(spec: str, options: dict[str, Any]) -> list[str]:
    """What the router that `spec` names answers while replicas come and go."""
    return answers(RouterSubject(load_router(spec), options))


def answers(subject: RouterSubject) -> list[str]:
    """What the router answers while replicas come and go."""
    from aioserve.testing.routers.rules import churned

    return churned(subject, seed=7).answers()


def _own_code(kind: type) -> Iterator[CodeType]:
    """Code of the class, of its bases that are no part of the seam, and functions within."""
    for base in kind.__mro__:
        if base.__module__.startswith(("aioserve.routing", "builtins", "abc")):
            continue
        for value in vars(base).values():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if hasattr(function, "__code__"):
                yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
