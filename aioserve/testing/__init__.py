"""What a policy author needs to test a policy: a harness that checks every rule at every step.

Loaded on first use, because the pytest plugin lives here and is imported in every pytest run.
`aioserve.testing.contract` and `.state_machine` need pytest and hypothesis; the rest does not.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioserve.testing.harness import SchedulerHarness
    from aioserve.testing.toy_runner import ToyRunner
    from aioserve.testing.violation import ContractViolation

__all__ = ["ContractViolation", "SchedulerHarness", "ToyRunner"]

_HOMES = {
    "ContractViolation": "violation",
    "ToyRunner": "toy_runner",
    "SchedulerHarness": "harness",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
