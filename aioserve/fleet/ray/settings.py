"""The `args` of a Serve config file: models, their groups of replicas, the router before them."""

import contextlib
import importlib
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from aioserve.config import AccessConfig, BatchConfig, EngineConfig, Section, ServerConfig
from aioserve.errors import ConfigError
from aioserve.fleet.routing import BaseRouter, check_roles, load_router
from aioserve.server.access.keys import ENVIRONMENT

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]

# Sections that the ingress reads once for all replicas, and settings of others.
SHARED = ("model", "images", "adapters", "server", "scoring")
SHARED_OF_CACHE = ("block_size", "enable_prefix_caching")


class Autoscaling(Section, frozen=True, kw_only=True):
    """The bounds between which there are replicas, and when there should be more."""

    min_replicas: PositiveInt = 1
    max_replicas: PositiveInt
    target_queued_prompt_tokens: PositiveFloat = 8192.0  # of one replica
    target_kv_cache_usage: Annotated[float, Meta(gt=0, le=1)] = 0.8  # of one replica
    upscale_delay_s: Annotated[float, Meta(ge=0)] = 5.0
    downscale_delay_s: Annotated[float, Meta(ge=0)] = 300.0
    look_back_period_s: Annotated[float, Meta(gt=10)] = 30.0  # Ray asks every ten

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas is {self.max_replicas}, below min_replicas ({self.min_replicas})"
            )


class ReplicaGroup(Section, frozen=True, kw_only=True):
    """Replicas of a model that are alike."""

    role: Literal["", "prefill", "decode"] = ""  # which routers see
    num_replicas: PositiveInt | None = None  # one, unless they are scaled
    autoscaling: Autoscaling | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # laid over those of the model
    ray_actor_options: dict[str, Any] = field(default_factory=dict)  # laid over the model's

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_replicas is not None and self.autoscaling is not None:
            raise ConfigError("num_replicas has no effect beside autoscaling: leave one out")

    @property
    def least(self) -> int:
        """The smallest number of replicas of the group."""
        return self.num_replicas or (
            1 if self.autoscaling is None else self.autoscaling.min_replicas
        )

    @property
    def is_alone(self) -> bool:
        """Whether there is never a second replica."""
        return self.autoscaling is None and self.num_replicas in (None, 1)


def names_of(groups: Sequence[ReplicaGroup]) -> list[str]:
    """Return what each group is called, behind the name of the model; empty for the only one."""
    if len(groups) == 1:
        return [""]
    roles = [group.role or "all" for group in groups]
    return [
        role if roles.count(role) == 1 else f"{role}-{roles[: i + 1].count(role)}"
        for i, role in enumerate(roles)
    ]


def check_shared(own: EngineConfig, config: EngineConfig, name: str) -> None:
    """Raises `ConfigError` if `own`, the settings of the group `name`, differ from those of the
    model where the ingress reads them.
    """
    pairs = [(section, getattr(own, section), getattr(config, section)) for section in SHARED]
    pairs += [
        (f"cache.{each}", getattr(own.cache, each), getattr(config.cache, each))
        for each in SHARED_OF_CACHE
    ]
    for setting, given, shared in pairs:
        if given != shared:
            raise ConfigError(
                f"{setting} differs in the group {name or 'all'}: the ingress reads it for all "
                "replicas, so it stands in the settings of the model"
            )


def check_hand_over(router: type[BaseRouter], config: EngineConfig, role: str) -> None:
    """Raises `ConfigError` if the router moves requests and their KV blocks could not follow."""
    if (role, config.cache.kv_role) in (("prefill", "consumer"), ("decode", "producer")):
        raise ConfigError(
            f"cache.kv_role of the replicas with the role {role} is {config.cache.kv_role}: then "
            "no block is handed over; both will do"
        )
    if config.cache.kv_connector != "disk":
        router.check_moves(
            "replicas hand KV blocks over through a directory that all of them see, so "
            "cache.kv_connector is to be disk, with a cache.kv_connector_path; got "
            f"{config.cache.kv_connector}"
        )


# The `args` of a Serve config file: which models, with how many replicas, behind which router. Data
# that checks itself. Knows no Ray.


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
        """The groups of the model's replicas, one at least."""
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
        """Return what each replica is started with, but for its group's own. Raises
        `ConfigError`.
        """
        return self._load({})

    def group_configs(self) -> list[EngineConfig]:
        """Return what the replicas of each group are started with. Raises `ConfigError`."""
        shared, configs = self.engine_config(), []
        for group, name in zip(self.all_groups, names_of(self.all_groups), strict=True):
            config = self._load(group.settings)
            check_shared(config, shared, name)
            if (router := self.router_class) is not None:
                check_hand_over(router, config, group.role)
                router.check_holds()
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
