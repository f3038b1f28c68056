"""What a router reads of replicas without asking for it, and what it calls that no run repeats.

Looks at compiled code, and at calls while it decides. Knows no decision.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from inspect import getmodule
from itertools import zip_longest
from types import CodeType

from aioserve.routing import REPORTED, BaseRouter
from aioserve.testing.foreign_calls import watched_calls
from aioserve.testing.routers.subject import RouterSubject
from aioserve.testing.violation import RouterViolation

PREFIXES = {"prefixes", "block_hashes", "block_size"}
HASH_SEEDS = "1", "2"
SECONDS = 120.0  # for a process that imports aioserve and asks a router 400 times: it has hung

_CHILD = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from aioserve.routing import load_router
from aioserve.testing.routers.reads import answers
from aioserve.testing.routers.subject import RouterSubject
print(json.dumps(answers(RouterSubject(load_router(sys.argv[2]), json.loads(sys.argv[3])))))
"""


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
    """The same events give the same answers where strings have other hashes. Looks at nothing if no
    other process can import the class.
    """
    spec = _spec_of(subject.kind)
    if spec is None:
        return
    words = json.dumps(sys.path), spec, json.dumps(dict(subject.options))
    one, other = (_answers_with(seed, words) for seed in HASH_SEEDS)
    for number, (first, second) in enumerate(zip_longest(one, other)):
        if first != second:
            raise RouterViolation(
                f"{subject.name}: answer {number} is {second} with PYTHONHASHSEED={HASH_SEEDS[1]} "
                f"and {first} with {HASH_SEEDS[0]}; does the router walk through a set of strings?"
            )


def answers(subject: RouterSubject) -> list[str]:
    """What the router answers while replicas come and go."""
    from aioserve.testing.routers.rules import churned

    return churned(subject, seed=7).answers()


def _answers_with(hash_seed: str, words: tuple[str, ...]) -> list[str]:
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, *words],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if child.returncode:
        raise RouterViolation(f"a process that asks the router has failed: {child.stderr[-800:]}")
    found: list[str] = json.loads(child.stdout)
    return found


def _spec_of(kind: type[BaseRouter]) -> str | None:
    module = getmodule(kind)
    if module is None or module.__name__ == "__main__":
        return None
    if module.__name__.startswith("aioserve_router_"):  # from a file, which `load_router` loads
        return f"{module.__file__}:{kind.__qualname__}"
    is_there = getattr(module, kind.__qualname__, None) is kind
    return f"{module.__name__}:{kind.__qualname__}" if is_there else None


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
