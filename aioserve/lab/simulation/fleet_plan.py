"""A fleet as it is described: how many replicas, behind which routers, at what price.

Knows YAML and what to refuse. Runs nothing.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.workloads.incidents import Incidents
from aioserve.lab.workloads.workload import Workload
from aioserve.routing import make_router
from aioserve.shipped import find_fleet
from aioserve.yaml_file import read_struct

Count = Annotated[int, Meta(ge=1)]
Price = Annotated[float, Meta(ge=0)]


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a fleet file."""

    replicas: Count
    routers: Annotated[tuple[str, ...], Meta(min_length=1)] = ("least_work",)
    price_per_hour: Price | None = None  # of a replica, in any currency
    incidents: Incidents = Incidents()  # beside those of the workload

    @classmethod
    def load(
        cls, words: str, routers: tuple[str, ...] | None = None, price: float | None = None
    ) -> "FleetSpec":
        """Load a fleet from a number of replicas, or a YAML file; what is given beside it goes
        before. Raises `ConfigError`.
        """
        if words.lstrip("-").isdigit():
            if int(words) < 1:
                raise ConfigError(f"a fleet has at least 1 replica, got {words}")
            spec = cls(replicas=int(words))
        else:
            spec = read_struct(find_fleet(words), "fleet", cls)
        if routers is not None:
            spec = msgspec.structs.replace(spec, routers=routers)
        if price is not None:
            spec = msgspec.structs.replace(spec, price_per_hour=price)
        for name in spec.routers:
            make_router(name)
        if len(set(spec.routers)) < len(spec.routers):
            raise ConfigError(f"a router is named twice: {', '.join(spec.routers)}")
        return spec

    def behind(self, router: str) -> "Fleet":
        """The fleet with one of its routers."""
        return Fleet(self.replicas, router, self.price_per_hour, self.incidents)


class Fleet(msgspec.Struct, frozen=True):
    """Equal replicas behind one router."""

    num_replicas: int
    router: str
    price_per_hour: float | None = None  # of a replica
    incidents: Incidents = Incidents()

    def check(self, config: EngineConfig, workload: Workload) -> None:
        """Raises `ConfigError` for incidents of replicas that there are not, and for settings that
        are of one engine.
        """
        (self.incidents + workload.incidents).check(self.num_replicas)
        settings = {
            "scheduler.decision_log": config.scheduler.decision_log,
            "scheduler.request_log": config.scheduler.request_log,
            "shadow.shadow_policy": config.shadow.shadow_policy,
        }
        for name, value in settings.items():
            if value is not None:
                raise ConfigError(
                    f"{name} is {value}, which is of one engine: a fleet is compared without it"
                )
        if config.cache.kv_connector != "none":
            raise ConfigError(
                f"cache.kv_connector is {config.cache.kv_connector}, but what is loaded from "
                "elsewhere is not simulated in a fleet: leave it out"
            )
        if config.speculation.speculative_method != "none":
            raise ConfigError(
                "speculation.speculative_method is for real models: in a fleet give "
                "runner.simulated_draft_tokens"
            )
