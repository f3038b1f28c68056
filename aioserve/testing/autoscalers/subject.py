"""The autoscaler that is under test, with its options.

Knows how it is made. Knows no rule.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aioserve.routing import AutoscalerInterface
from aioserve.testing.autoscalers.toy_fleet import ScaledToyFleet, ToyPlan


@dataclass(frozen=True)
class AutoscalerSubject:
    """An autoscaler that the contract runs on, with its options."""

    autoscaler: type[AutoscalerInterface]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> type[AutoscalerInterface]:
        """The class that a violation blames."""
        return self.autoscaler

    @property
    def name(self) -> str:
        """The name by which messages call the autoscaler."""
        return self.autoscaler.__name__

    def fleet(self, load: Callable[[float], float], plan: ToyPlan) -> ScaledToyFleet:
        """A new fleet with a new autoscaler; `load` is how many replicas would be kept full at a
        time in seconds.
        """
        return ScaledToyFleet(self.autoscaler, self.options, load, plan)
