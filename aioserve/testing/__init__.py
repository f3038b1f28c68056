"""What a policy author needs to test a policy: a harness that checks every rule at every step.

Loaded on first use, because the pytest plugin lives here and is imported in every pytest run.
`aioserve.testing.contract` and `.state_machine` need pytest and hypothesis; the rest does not.
"""

from typing import TYPE_CHECKING

from aioserve.support import late_names

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

__getattr__ = late_names(__name__, _HOMES)
