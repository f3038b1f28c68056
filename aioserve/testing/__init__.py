"""What a policy author needs to test a policy: a harness that checks every rule at every step."""

from aioserve.testing.harness import ContractViolation, SchedulerHarness
from aioserve.testing.memory import KVMemory

__all__ = ["ContractViolation", "KVMemory", "SchedulerHarness"]
