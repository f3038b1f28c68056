"""Replicas of a simulated fleet that are not alike: slower ones, smaller ones, ones with a role.

Plain data that checks itself. Knows no engine.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.routing import check_roles

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]


class ReplicaGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some replicas of a fleet that are alike."""

    replicas: Count
    role: Literal["", "prefill", "decode"] = ""  # which routers see
    slowdown: Positive = 1.0  # the factor by which their steps are longer than the model says
    num_kv_blocks: Count | None = None  # of the KV cache (default: as the settings say)

    def config(self, config: EngineConfig) -> EngineConfig:
        """The engine settings of the replicas of this group."""
        if self.num_kv_blocks is None:
            return config
        cache = msgspec.structs.replace(config.cache, num_kv_blocks=self.num_kv_blocks)
        return msgspec.structs.replace(config, cache=cache)


def check_groups(groups: Sequence[ReplicaGroup], num_replicas: int) -> None:
    """Raises `ConfigError` if the groups are not exactly the fleet, or a role is missing."""
    if not groups:
        return
    count = sum(group.replicas for group in groups)
    if count != num_replicas:
        raise ConfigError(f"the groups have {count} replicas, and the fleet has {num_replicas}")
    check_roles(group.role for group in groups)


def group_of_places(groups: Sequence[ReplicaGroup], num_replicas: int) -> list[ReplicaGroup]:
    """The group of each replica, in their order."""
    equal = (ReplicaGroup(replicas=num_replicas),)
    return [group for group in groups or equal for _ in range(group.replicas)]
