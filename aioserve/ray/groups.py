"""Groups of replicas of one model that are alike: each is a deployment of its own.

So Ray scales each group by itself, and no role is left without a replica. Data that checks itself.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from aioserve.config import EngineConfig, Section
from aioserve.errors import ConfigError
from aioserve.routing import BaseRouter

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveFloat = Annotated[float, Meta(gt=0)]

# Sections that the ingress reads once for all replicas, and settings of others.
SHARED = ("model", "images", "adapters", "server", "scoring")
SHARED_OF_CACHE = ("block_size", "enable_prefix_caching")


class Autoscaling(Section, frozen=True, kw_only=True):
    """Between how many replicas there are, and when there should be more."""

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
        """Replicas that there always are."""
        return self.num_replicas or (
            1 if self.autoscaling is None else self.autoscaling.min_replicas
        )

    @property
    def is_alone(self) -> bool:
        """Whether there is never a second replica."""
        return self.autoscaling is None and self.num_replicas in (None, 1)


def names_of(groups: Sequence[ReplicaGroup]) -> list[str]:
    """What each group is called, behind the name of the model; empty for the only one."""
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
