"""The engine's step cycle without IO, and what it tells its observers."""

from aioserve.step_loop.failure_log import FAULTS, FailureLog
from aioserve.step_loop.loop import IDLE_POLL_SECONDS, StepInFlight, StepLoop
from aioserve.step_loop.observers import Observers, StepObserver

__all__ = [
    "FAULTS",
    "IDLE_POLL_SECONDS",
    "FailureLog",
    "Observers",
    "StepInFlight",
    "StepLoop",
    "StepObserver",
]
