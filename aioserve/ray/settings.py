"""The `args` of a Serve config file: which models, with how many replicas, behind which router.

Data that checks itself. Knows no Ray.
"""

import contextlib
import importlib
import os
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from aioserve.config import AccessConfig, BatchConfig, EngineConfig, Section, ServerConfig
from aioserve.errors import ConfigError
from aioserve.ray.groups import (
    Autoscaling,
    PositiveFloat,
    PositiveInt,
    ReplicaGroup,
    check_hand_over,
    check_shared,
    names_of,
)
from aioserve.routing import BaseRouter, check_roles, load_router
from aioserve.server.access.keys import ENVIRONMENT

Percent = Annotated[int, Meta(ge=0, le=100)]

# Of the server's settings, those that its handlers read; the others are of its socket and its life.
SERVED = {
    "tool_call_parser",
    "reasoning_parser",
    "max_body_mib",
    "ignore_unknown_fields",
}


class ModelSettings(Section, frozen=True, kw_only=True):
    """The settings of one model and of its replicas."""

    config: str | None = None  # a file, or the name of one in configs/, as for `--config`
    settings: dict[str, Any] = field(default_factory=dict)  # laid over it, as by `--set`
    num_replicas: PositiveInt | None = None  # one, unless they are scaled
    autoscaling: Autoscaling | None = None
    groups: tuple[ReplicaGroup, ...] = ()  # of replicas that are alike (default: all are)
    router: str = "prefix"  # a name, file.py or module:Class, also one of Ray's own
    router_options: dict[str, Any] = field(default_factory=dict)
    ray_actor_options: dict[str, Any] = field(default_factory=dict)  # num_cpus, num_gpus, ...
    max_ongoing_requests: PositiveInt = 10_000  # of a replica; its engine refuses what is too much
    graceful_shutdown_timeout_s: PositiveFloat = 600.0  # for a replica's requests, when it goes
    max_surge_percent: Percent = 0  # of the replicas, that start before others go in a change
    direct_port: Annotated[int, Meta(ge=1, le=65535)] | None = None  # of each ingress, for HTTP
    direct_host: str = "127.0.0.1"  # the address of that port

    def __post_init__(self) -> None:
        super().__post_init__()
        if (router := self.router_class) is not None:
            router.parse_options(self.router_options)
        elif self.router_options:
            raise ConfigError(
                f"router_options are of aioserve's routers, and {self.router} is a class of Ray's"
            )
        own = ReplicaGroup(num_replicas=self.num_replicas, autoscaling=self.autoscaling)
        if self.groups and own != ReplicaGroup():
            raise ConfigError("num_replicas and autoscaling have no effect beside groups")
        if self.groups and self.router_class is None:
            raise ConfigError(f"groups are for aioserve's routers, and {self.router} is Ray's")
        check_roles(group.role for group in self.all_groups)

    @property
    def all_groups(self) -> tuple[ReplicaGroup, ...]:
        """The groups of its replicas, one at least."""
        own = ReplicaGroup(num_replicas=self.num_replicas, autoscaling=self.autoscaling)
        return self.groups or (own,)

    @property
    def router_class(self) -> type[BaseRouter] | None:
        """The router; None for a class of Ray's, which Ray loads. Raises `ConfigError`."""
        module, colon, name = self.router.partition(":")
        if not colon or module.endswith(".py"):
            return load_router(self.router)
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, type) and issubclass(found, BaseRouter):
                return load_router(self.router)
        return None

    @property
    def wants_hashes(self) -> bool:
        """Whether its router looks at hashes of blocks."""
        return self.router_class is not None and self.router_class.uses_prefixes

    def engine_config(self) -> EngineConfig:
        """What each replica is started with, but for its group's own. Raises `ConfigError`."""
        return self._load({})

    def group_configs(self) -> list[EngineConfig]:
        """What the replicas of each group are started with. Raises `ConfigError`."""
        shared, configs = self.engine_config(), []
        for group, name in zip(self.all_groups, names_of(self.all_groups), strict=True):
            config = self._load(group.settings)
            check_shared(config, shared, name)
            if (router := self.router_class) is not None:
                check_hand_over(router, config, group.role)
            configs.append(config)
        return configs

    def _load(self, more: dict[str, Any]) -> EngineConfig:
        config = EngineConfig.load(self.config, list((self.settings | more).items()))
        is_alone = len(self.all_groups) == 1 and self.all_groups[0].is_alone
        for name in ("decision_log", "request_log"):
            if getattr(config.scheduler, name) is not None and not is_alone:
                raise ConfigError(
                    f"scheduler.{name} is the file of one engine, and all replicas would write it: "
                    "leave it out, or have one replica"
                )
        return config


class RaySettings(Section, frozen=True, kw_only=True):
    """All settings of a Ray Serve application."""

    models: Annotated[tuple[ModelSettings, ...], Meta(min_length=1)]
    num_ingress_replicas: PositiveInt = 1  # processes that do HTTP
    ingress_actor_options: dict[str, Any] = field(default_factory=dict)
    ingress_max_surge_percent: Percent = 0  # of the ingresses, as of the replicas

    @classmethod
    def of(cls, config: dict[str, Any]) -> "RaySettings":
        """Raises `ConfigError` that names what is wrong."""
        try:
            return msgspec.convert(config, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"args of the Ray application: {error}") from None


def check_served(config: EngineConfig) -> None:
    """Raises `ConfigError` for what has no effect behind Ray's proxies."""
    refused = {"server": ServerConfig(), "access": AccessConfig(), "batches": BatchConfig()}
    for section, defaults in refused.items():
        given = getattr(config, section)
        for name in type(given).__struct_fields__:
            if name not in SERVED and getattr(given, name) != getattr(defaults, name):
                raise ConfigError(
                    f"{section}.{name} has no effect on Ray Serve, which has proxies, routes and a "
                    "life of its own: set it there"
                )
    if ENVIRONMENT in os.environ:
        raise ConfigError(
            f"{ENVIRONMENT} has no effect on Ray Serve: put what asks for keys in front of it"
        )
