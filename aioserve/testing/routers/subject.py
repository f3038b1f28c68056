"""The router that is under test, with its options.

Knows how it is made. Knows no rule.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioserve.routing import BaseRouter
from aioserve.testing.routers.toy_fleet import ToyFleet


@dataclass(frozen=True)
class RouterSubject:
    """A router that the contract runs on, with its options."""

    router: type[BaseRouter]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> type[BaseRouter]:
        """The class that a violation blames."""
        return self.router

    @property
    def name(self) -> str:
        """The name by which messages call the router."""
        return self.router.__name__

    def fleet(
        self,
        num_replicas: int,
        *,
        delay: float = 0.0,
        silent: frozenset[str] = frozenset(),
        seed: int = 0,
        roles: Sequence[str] = (),
    ) -> ToyFleet:
        """A new fleet behind a new router."""
        return ToyFleet(
            self.router,
            self.options,
            num_replicas,
            delay=delay,
            silent=silent,
            seed=seed,
            roles=roles,
        )
