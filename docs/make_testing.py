"""Writes policy-contract.md and scheduler-harness.md from docstrings of the kit and its tests.

python docs/make_testing.py
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if str(HERE.parent) not in sys.path:  # the planted bugs are among the tests
    sys.path.insert(0, str(HERE.parent))

from aioserve.testing import SchedulerHarness, invariants  # noqa: E402
from aioserve.testing.bench import Bench  # noqa: E402
from aioserve.testing.contract import ClientRules, PolicyContract, PolicyRules  # noqa: E402

CONTRACT_HEAD = """\
# What the contract of policies checks

Made from the tests and their docstrings by `python docs/make_testing.py`; a test keeps it true.
`python -m aioserve check path/to/mine.py:Mine` runs all of it on a policy, each test once with one
step in flight and once with two ([writing a policy](writing-a-policy.md#3-the-contract)).
"""

RULES_HEAD = """\
## Tests

`test_no_rule_is_broken_under_random_traffic` takes most of the time: `--examples N` says
how many random sequences of events it makes (default: 100).
"""

ALWAYS_HEAD = """\
## After every call

These hold after each call of the [harness](scheduler-harness.md), in every test of the contract and
in tests of your own; the one that begins with "Nothing" when no request is left.
"""

BUGS_HEAD = """\
## Bugs that it catches

Each is a policy with one planted bug that the tests of aioserve have the contract find. The files
[broken.py](../tests/testing/broken.py), [costly.py](../tests/testing/costly.py) and
[unfair.py](../tests/testing/unfair.py) have their code, and what the contract says of each.
"""

HARNESS_HEAD = """\
# SchedulerHarness

Made from the docstrings by `python docs/make_testing.py`; a test keeps it true.
`aioserve.testing.SchedulerHarness` drives one policy step by step, without a model, a thread or a
wall clock, and checks after every call [what has to be true](policy-contract.md#after-every-call)
([an example](writing-a-policy.md#3-the-contract)).
"""

#: Sections of the page of the harness: title, and the names in it, in order.
HARNESS_SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("What clients do", ("add_request", "finish", "ask_again", "abort_everything")),
    ("What the engine does", ("step", "run_until_idle", "wait", "reset_prefix_cache")),
    (
        "The same in pieces",
        ("plan", "schedule", "receive", "expire", "fail_steps", "discard_step", "blocks_come"),
    ),
    ("What operators do", ("switch_policy", "fail_switch")),
    (
        "What can be checked besides",
        (
            *("check", "check_idle", "check_repeatable", "check_foresees_no_end"),
            *("check_keeps_decoding", "check_hash_order", "check_own_time", "check_cost"),
            "check_memory",
        ),
    ),
    ("What has happened", ("tokens", "finished", "num_in_flight", "findable", "scheduler")),
)
#: Attributes that `__init__` assigns, with what they are.
HARNESS_ATTRIBUTES = {
    "now": "the clock, in seconds",
    "steps": "each `SchedulerOutput` that was planned, in order: `num_scheduled_tokens`, "
    "`preempted_req_ids`, ...",
    "requests": "the newest `Request` of each name",
    "kv_cache": "the policy's `KVCacheManager`",
    "turned_away": "requests that were rejected or not let in, and after how many seconds each may "
    "ask again",
    "errors": "what the policy raised, with `tolerates_errors`",
}


def contract() -> str:
    """The page `policy-contract.md`."""
    parts = [CONTRACT_HEAD, RULES_HEAD, "| test | how |", "|---|---|"]
    for kind in (ClientRules, PolicyRules, PolicyContract):
        tests = [(name, test) for name, test in vars(kind).items() if name.startswith("test_")]
        parts += [f"| `{name}` | {_prose(test)} |" for name, test in tests]
    parts += ["", ALWAYS_HEAD]
    parts += [f"- {_prose(rule)}" for rule in _always()]
    parts += ["", BUGS_HEAD, "| planted bug | what the policy does |", "|---|---|"]
    parts += [f"| `{bug.__name__}` | {_prose(bug)} |" for bug in planted_bugs()]
    return "\n".join(parts) + "\n"


def planted_bugs() -> Iterable[type[Any]]:
    """The broken policies, in the order of the files."""
    from tests.testing.unfair import CAUGHT_BY

    return CAUGHT_BY


def _always() -> list[Callable[..., Any]]:
    """The rules of `invariants` that say in a docstring what they hold."""
    rules = [f for f in vars(invariants).values() if inspect.isfunction(f)]
    own = [f for f in rules if f.__module__ == invariants.__name__ and f.__doc__]
    return [f for f in own if f.__doc__.startswith(("Check", "Nothing"))]


def harness() -> str:
    """The page `scheduler-harness.md`."""
    parts = [HARNESS_HEAD, _prose(SchedulerHarness), "", "## How it is made", ""]
    parts += [f"`SchedulerHarness{_signature(Bench.__init__)}`", ""]
    parts += [" ".join(text.split()) + "\n" for text in _doc(Bench.__init__).split("\n\n")]
    for title, names in HARNESS_SECTIONS:
        parts += [f"## {title}", "", *map(_member, names), ""]
    parts.pop()
    parts += [f"- `{name}`: {what}" for name, what in HARNESS_ATTRIBUTES.items()]
    return "\n".join(parts) + "\n"


def _member(name: str) -> str:
    found = inspect.getattr_static(SchedulerHarness, name)
    if isinstance(found, property):
        return f"- `{name}`: {_prose(found)}"
    return f"- `{name}{_signature(found)}`: {_prose(found)}"


def _signature(function: Callable[..., Any]) -> str:
    """Names and defaults, without types, which the reader of a page does not need."""
    signature = inspect.signature(function)
    parameters = [
        p.replace(annotation=inspect.Parameter.empty, default=_default(p.default))
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    bare = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    return str(bare)


class _Named:
    """A default that is a member of an enumeration, by its name."""

    def __init__(self, member: Enum) -> None:
        self._member = member

    def __repr__(self) -> str:
        return f"{type(self._member).__name__}.{self._member.name}"


def _default(value: Any) -> Any:
    return _Named(value) if isinstance(value, Enum) else value


def _doc(documented: object) -> str:
    return inspect.getdoc(documented) or ""


def _prose(documented: object) -> str:
    return " ".join(_doc(documented).split()).replace("|", "\\|")


def pages() -> dict[str, str]:
    """By name, what the files should hold."""
    return {"policy-contract.md": contract(), "scheduler-harness.md": harness()}


if __name__ == "__main__":
    for file_name, text in pages().items():
        (HERE / file_name).write_text(text, encoding="utf-8")
