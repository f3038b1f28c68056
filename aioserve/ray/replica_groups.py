"""The deployments of one model as an ingress knows them: who is asked, and which replica is where.

Knows handles and tickets. Does not know how a replica is chosen.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from ray.serve.handle import DeploymentHandle

from aioserve.config import EngineConfig
from aioserve.ray.directory import Tickets, subscribe, unsubscribe
from aioserve.ray.replica import ReplicaInfo
from aioserve.ray.router import deployment_key
from aioserve.ray.settings import ModelSettings
from aioserve.support.version import __version__

logger = logging.getLogger(__name__)

ASK_AGAIN_SECONDS = 0.2  # after a replica with other settings has answered
PATIENCE_SECONDS = 30.0  # after which the log says that no replica has started


class ReplicaGroups:
    """One for each front end."""

    def __init__(
        self,
        handles: Sequence[DeploymentHandle],
        model: ModelSettings,
        configs: Sequence[EngineConfig],
    ) -> None:
        """Each of `handles` leads to the replicas of one group, in their order, and each of
        `configs` is what they are started with.
        """
        self._configs = list(configs)
        self.handles = list(handles)
        self._roles = [group.role for group in model.all_groups]
        self._tickets: list[Tickets] = [{} for _ in self.handles]  # by group
        self._subscribed: list[tuple[str, Callable[[Tickets], object]]] = []

    def role_of(self, name: str) -> str:
        """The role of a replica that has been told of."""
        for role, tickets in zip(self._roles, self._tickets, strict=True):
            if name in tickets:
                return role
        return ""

    async def describe(self, model: str) -> ReplicaInfo:
        """What all replicas can do, once each group has one with the settings and version of this
        ingress. While an application changes there are others, and what they say does not last.
        """
        asking = asyncio.ensure_future(asyncio.gather(*map(self._ask_alike, self._members())))
        try:
            while not (await asyncio.wait([asking], timeout=PATIENCE_SECONDS))[0]:
                logger.warning(
                    "no replica of %r with the settings of this ingress, and version %s, has "
                    "started yet: `serve status` and `ray status` say why",
                    *(model, __version__),
                )
            return min(asking.result(), key=lambda info: info.max_model_len)
        finally:
            asking.cancel()

    def _members(self) -> list[tuple[DeploymentHandle, EngineConfig]]:
        return list(zip(self.handles, self._configs, strict=True))

    async def _ask_alike(self, member: tuple[DeploymentHandle, EngineConfig]) -> ReplicaInfo:
        handle, config = member
        while True:
            info: ReplicaInfo = await handle.describe.remote()
            if (info.version, info.config) == (__version__, config):
                return info
            await asyncio.sleep(ASK_AGAIN_SECONDS)

    async def ask_all(self) -> list[ReplicaInfo]:
        """What a replica of each group says of itself."""
        asked = [handle.describe.remote() for handle in self.handles]
        return list(await asyncio.gather(*asked))

    def subscribe(self, follower: Callable[[Tickets], object]) -> None:
        """Call `follower` with all replicas of all groups, now if any are known, and whenever they
        change: on the threads of Ray's routers.
        """

        def hear(number: int, tickets: Tickets) -> None:
            self._tickets[number] = tickets
            follower({name: own[name] for own in list(self._tickets) for name in own})

        for number, handle in enumerate(self.handles):
            key = deployment_key(handle.deployment_name, handle.app_name)
            self._subscribed.append((key, partial(hear, number)))
            subscribe(*self._subscribed[-1])

    def unsubscribe(self) -> None:
        """The follower is told of no further change of replicas. Idempotent."""
        while self._subscribed:
            unsubscribe(*self._subscribed.pop())
