"""The policy lab: the same engine and policies on a virtual clock."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aioserve.support import late_names

if TYPE_CHECKING:
    from aioserve.lab.simulation.run import VirtualClockEventLoop

__all__ = ["VirtualClockEventLoop"]

BRINGS: Mapping[str, Mapping[Any, str]] = {
    # What simulated steps take, by the name that `runner.profile` gives.
    "step times": {
        "card": "aioserve.lab.cards.measured:CardStepTimes",
        "operators": "aioserve.lab.cards.operators:OperatorTimes",
        "tables": "aioserve.lab.cards.tables:TableStepTimes",
    },
    # What engines load for their settings: `engine.builder`, `.async_engine` and `.metrics`.
    "engine": {
        "decision log": "aioserve.lab.decision_log.recorder:recorded",
        "policy trials": "aioserve.lab.policy_trials:PolicyTrials",
        "shadow metrics": "aioserve.lab.shadow:ShadowMetrics",
        "shadow settings": "aioserve.lab.shadow:shadow_settings",
        "shadows": "aioserve.lab.shadow:ShadowBuilder",
    },
}

__getattr__ = late_names(__name__, {"VirtualClockEventLoop": "simulation.run"})
