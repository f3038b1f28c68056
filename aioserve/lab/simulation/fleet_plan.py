"""A fleet as it is described: how many replicas, behind which routers, at what price.

Knows YAML and what to refuse. Plain data that checks itself; runs and loads nothing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.fleet.routing import check_roles, load_router
from aioserve.lab.simulation.fleet_changes import (
    AutoscalerChoice,
    Autoscaling,
    Choice,
    check_choices,
)
from aioserve.lab.workloads.workload import Incidents, Workload
from aioserve.scheduler import BaseScheduler, load_policy
from aioserve.support.files import find_fleet, read_struct

Count = Annotated[int, Meta(ge=1)]
Price = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class ReplicaGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some replicas of a fleet that are alike."""

    replicas: Count
    role: Literal["", "prefill", "decode"] = ""  # which routers see
    slowdown: Positive = 1.0  # the factor by which their steps are longer than the model says
    num_kv_blocks: Count | None = None  # of the KV cache (default: as the settings say)
    policy: str | None = None  # with its options (default: the policy of the settings)
    options: dict[str, Any] = {}
    card: str | None = None  # as `--card` has it (default: the profile of the settings)
    card_model: str | None = None
    card_tp: Count | None = None
    price_per_hour: Price | None = None  # of a replica (default: as the fleet says)

    def config(self, config: EngineConfig) -> EngineConfig:
        """Return the engine settings of the replicas of this group. A card brings the KV cache that
        it holds, unless the group says how large that is.
        """
        replace = msgspec.structs.replace
        if self.policy is not None:
            scheduler = replace(config.scheduler, policy=self.policy, options=self.options)
            config = replace(config, scheduler=scheduler)
        if self.card is not None:
            profile, options = card_profile(self.card, self.card_model, self.card_tp)
            runner = replace(config.runner, profile=profile, profile_options=options)
            config = replace(config, runner=runner, cache=replace(config.cache, num_kv_blocks=None))
        if self.num_kv_blocks is not None:
            cache = replace(config.cache, num_kv_blocks=self.num_kv_blocks)
            config = replace(config, cache=cache)
        return config

    def check(self) -> None:
        """Raise `ConfigError` for what is of a policy or a card, where the group has none."""
        if self.options and self.policy is None:
            raise ConfigError("options of a group are of its policy: give policy as well")
        for name in ("card_model", "card_tp"):
            if self.card is None and getattr(self, name) is not None:
                raise ConfigError(f"{name} of a group is of its card: give card as well")
        if self.policy is not None:
            policy = load_policy(self.policy)
            if issubclass(policy, BaseScheduler):
                policy.parse_options(self.options)


def card_profile(card: str, model: str | None, tp: int | None) -> tuple[str, dict[str, Any]]:
    """Return the settings `runner.profile` and `runner.profile_options` of a card: of a ready
    profile, or of a card with a model.
    """
    given = {name: value for name, value in (("model", model), ("tp", tp)) if value is not None}
    return ("card", {"card": card, **given}) if given else (card, {})


def check_groups(groups: Sequence[ReplicaGroup], num_replicas: int) -> None:
    """Raises `ConfigError` if the groups are not exactly the fleet, or a role is missing."""
    if not groups:
        return
    count = sum(group.replicas for group in groups)
    if count != num_replicas:
        raise ConfigError(f"the groups have {count} replicas, and the fleet has {num_replicas}")
    check_roles(group.role for group in groups)
    for group in groups:
        group.check()


def group_of_places(groups: Sequence[ReplicaGroup], num_replicas: int) -> list[ReplicaGroup]:
    """Return the group of each replica, in their order."""
    equal = (ReplicaGroup(replicas=num_replicas),)
    return [group for group in groups or equal for _ in range(group.replicas)]


# The fleet: how many replicas, behind which routers, at what price.


Rate = Annotated[float, Meta(gt=0)]
Seconds = Annotated[float, Meta(ge=0, le=60)]


class RouterChoice(Choice, frozen=True, kw_only=True):
    """A router with options, as a fleet file has it beside those that are plain names."""

    router: str  # a name, package.module:Class or a file

    @property
    def spec(self) -> str:
        """A name, `package.module:Class` or a file."""
        return self.router

    def check(self) -> None:
        """Raise `ConfigError` for a router that there is not, or options that it has not."""
        load_router(self.router).parse_options(self.options)


class FleetSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a fleet file."""

    replicas: Count  # the most, where they are scaled
    routers: Annotated[tuple[str | RouterChoice, ...], Meta(min_length=1)] = ("least_work",)
    price_per_hour: Price | None = None  # of a replica, in any currency
    incidents: Incidents = Incidents()  # beside those of the workload
    knowledge_delay: Seconds = 0.0  # after which the sender hears of a replica, in seconds
    autoscaling: Autoscaling | None = None
    groups: tuple[ReplicaGroup, ...] = ()  # of replicas that are alike (default: all are)
    transfer_gb_per_second: Rate | None = None  # of KV cache between replicas; None: none is copied

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
            path = find_fleet(words)
            spec = _beside(read_struct(path, "fleet", cls), path)
        if routers is not None:
            spec = msgspec.structs.replace(spec, routers=routers)
        if price is not None:
            spec = msgspec.structs.replace(spec, price_per_hour=price)
        check_choices(spec.choices, "a router")
        check_groups(spec.groups, spec.replicas)
        if spec.autoscaling is not None:
            roles = {group.role for group in spec.groups} - {""}
            spec.autoscaling.check(spec.replicas, len(roles))
        return spec

    @property
    def choices(self) -> tuple[RouterChoice, ...]:
        """The routers, each with its options."""
        return tuple(
            RouterChoice(router=each) if isinstance(each, str) else each for each in self.routers
        )

    @property
    def scalers(self) -> tuple[AutoscalerChoice | None, ...]:
        """The autoscalers, each with its options; one None for a fleet that is not scaled."""
        return (None,) if self.autoscaling is None else self.autoscaling.choices

    def behind(self, choice: RouterChoice, scaler: AutoscalerChoice | None = None) -> "Fleet":
        """Return the fleet with one of its routers, and one of its autoscalers."""
        scaling = self.autoscaling
        if scaling is not None and scaler is not None:
            scaling = msgspec.structs.replace(scaling, autoscalers=(scaler,))
        return Fleet(
            self.replicas,
            choice.router,
            self.price_per_hour,
            self.incidents,
            choice.options,
            self.knowledge_delay,
            scaling,
            self.groups,
            self.transfer_gb_per_second,
        )


def _beside(spec: FleetSpec, path: Path) -> FleetSpec:
    """Return the fleet; routers and autoscalers that are files beside `path` with their paths."""

    def found(given: str) -> str:
        file, colon, name = given.partition(":")
        beside = path.parent / file
        return f"{beside}{colon}{name}" if file.endswith(".py") and beside.is_file() else given

    routers = tuple(
        found(each)
        if isinstance(each, str)
        else msgspec.structs.replace(each, router=found(each.router))
        for each in spec.routers
    )
    scaling = spec.autoscaling
    if scaling is not None:
        scalers = tuple(
            found(each)
            if isinstance(each, str)
            else msgspec.structs.replace(each, autoscaler=found(each.autoscaler))
            for each in scaling.autoscalers
        )
        scaling = msgspec.structs.replace(scaling, autoscalers=scalers)
    groups = tuple(
        msgspec.structs.replace(
            group,
            policy=group.policy and found(group.policy),
            card=group.card and _beside_file(group.card, path),
        )
        for group in spec.groups
    )
    return msgspec.structs.replace(spec, routers=routers, autoscaling=scaling, groups=groups)


def _beside_file(card: str, path: Path) -> str:
    """Return a card; a profile that is a file beside `path` with its path."""
    beside = path.parent / card
    return str(beside) if card.endswith((".yaml", ".yml")) and beside.is_file() else card


class Fleet(msgspec.Struct, frozen=True):
    """A fleet file: the replicas behind one router, and what befalls them."""

    num_replicas: int
    router: str
    price_per_hour: float | None = None  # of a replica
    incidents: Incidents = Incidents()
    router_options: dict[str, Any] = {}
    knowledge_delay: float = 0.0  # seconds after which the sender hears of a replica
    autoscaling: Autoscaling | None = None  # with one autoscaler
    groups: tuple[ReplicaGroup, ...] = ()
    transfer_gb_per_second: float | None = None  # of KV cache, in 1e9 bytes

    @property
    def prices(self) -> list[float] | None:
        """The price of an hour of each replica; None if no price is stated."""
        stated = [group.price_per_hour for group in self.groups]
        if self.price_per_hour is None and not any(price is not None for price in stated):
            return None
        groups = group_of_places(self.groups, self.num_replicas)
        usual = self.price_per_hour or 0.0
        return [usual if g.price_per_hour is None else g.price_per_hour for g in groups]

    def check(self, config: EngineConfig, workload: Workload) -> None:
        """Raises `ConfigError` for incidents of replicas that there are not, and for settings that
        are of one engine.
        """
        (self.incidents + workload.incidents).check(self.num_replicas)
        if self.transfer_gb_per_second is None:
            load_router(self.router).check_moves(
                "KV blocks are handed over only in a fleet file with transfer_gb_per_second"
            )
        for group in self.groups:
            blocks = group.num_kv_blocks
            if blocks is not None and blocks * config.cache.block_size < workload.longest:
                raise ConfigError(
                    f"a group of {group.replicas} replicas has {blocks} KV blocks of "
                    f"{config.cache.block_size} tokens; the longest request of the workload has "
                    f"{workload.longest} tokens"
                )
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
        if config.speculation.drafts_surely:
            raise ConfigError(
                "speculation.speculative_method is for real models: in a fleet give "
                "runner.simulated_draft_tokens"
            )
