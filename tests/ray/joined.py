"""Replicas and front ends on one loop, with real lines between them: all of it but Ray."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

from aioserve.config import EngineConfig
from aioserve.engine import AsyncEngine
from aioserve.fleet.ray.fleet import publish
from aioserve.fleet.ray.front import RayFront
from aioserve.fleet.ray.kv_feed import KVFeed, model_of
from aioserve.fleet.ray.line import Door
from aioserve.fleet.ray.replica import ReplicaInfo, Reporter
from aioserve.fleet.ray.settings import ModelSettings
from aioserve.fleet.routing import Dispatcher
from aioserve.outputs import RequestOutput
from aioserve.runner.interface import RunnerInterface
from aioserve.support import __version__

_numbers = itertools.count()


class Replica:
    """An engine with a door and a feed, as `EngineReplica` has them."""

    def __init__(self, config: EngineConfig, runner: RunnerInterface | None = None) -> None:
        self.name = f"replica-{next(_numbers)}"
        clock = asyncio.get_running_loop().time
        reporter = Reporter(config, lambda: self.engine.get_stats(), clock)
        self.feed = KVFeed(
            "127.0.0.1", reporter.make, lambda: self.door.open(), model=model_of(config)
        )
        self.engine = AsyncEngine(config, runner=runner, on_kv_event=self.feed.note)
        self.door: Door

    async def start(self) -> None:
        await self.engine.start()
        self.door = Door(self.engine, "127.0.0.1")
        self.feed.start()

    async def die(self) -> None:
        """At once, whatever it has."""
        self.door.close()
        await self.feed.close()
        await self.engine.shutdown()


class Handle:
    """What a front end asks of Ray: what replicas are, and, of Ray's routers, a place at one."""

    deployment_name = "engine"

    def __init__(self, info: ReplicaInfo, replicas: Sequence[Replica] = ()) -> None:
        self.app_name = f"app-{next(_numbers)}"
        self.describe = SimpleNamespace(remote=lambda: asyncio.sleep(0, info))
        self.replicas = list(replicas)
        self.held: list[Held] = []

    def options(self, method_name: str, *, stream: bool) -> Any:
        assert (method_name, stream) == ("hold", True)

        def remote(prompt: list[int]) -> "Held":
            self.held.append(Held(self.replicas[len(self.held) % len(self.replicas)]))
            return self.held[-1]

        return SimpleNamespace(remote=remote)


class Held:
    """A call that is open as long as its request is there."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.is_cancelled = False

    async def __anext__(self) -> tuple[str, str]:
        return self._replica.name, self._replica.feed.ticket.encode()

    def cancel(self) -> None:
        self.is_cancelled = True


class Joined:
    """Replicas, and the front ends before them."""

    def __init__(self, config: EngineConfig, model: ModelSettings) -> None:
        self.config = config
        self.model = model
        self.replicas: list[Replica] = []
        self.fronts: list[RayFront] = []
        self.handles: list[Handle] = []  # one for each group

    @property
    def handle(self) -> Handle:
        """The handle of the first group of replicas."""
        return self.handles[0]

    def tell(self, *replicas: Replica) -> None:
        """As Ray does: these are all that there are."""
        for handle in self.handles:
            own = [replica for replica in replicas if replica in handle.replicas]
            if handle is self.handle:  # and what came later
                own += [r for r in replicas if all(r not in h.replicas for h in self.handles)]
            tickets = {replica.name: replica.feed.ticket.encode() for replica in own}
            publish(f"{handle.app_name}#{handle.deployment_name}", tickets)

    def dispatcher(self, number: int = 0) -> Dispatcher:
        """Of a front end."""
        return self.fronts[number].dispatcher

    async def expect_lines(self, number: int, front: int = 0) -> None:
        """Return when a front end has this number of lines."""
        async with asyncio.timeout(20):
            while len(self.fronts[front].fleet.lines) != number:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def joined(
    config: EngineConfig,
    num_replicas: int = 2,
    num_fronts: int = 1,
    runner: RunnerInterface | None = None,
    **model: Any,
) -> AsyncIterator[Joined]:
    """All have started, and each front end has a line to each replica. `runner` is the first
    replica's. Groups of the model say how many replicas there are.
    """
    both = Joined(config, ModelSettings(**({"router": "round_robin"} | model)))
    async with AsyncExitStack() as stack:
        for group in both.model.all_groups:
            count = group.least if both.model.groups else num_replicas
            own: list[Replica] = []
            for _ in range(count):
                is_first = not both.replicas
                replica = Replica(config, runner if is_first else None)
                await replica.start()
                stack.push_async_callback(replica.die)
                both.replicas.append(replica)
                own.append(replica)
            both.handles.append(Handle(info_of(own[0].engine, config), own))
        both.tell(*both.replicas)
        for seed in range(num_fronts):
            front = RayFront(
                config,
                both.handles,  # type: ignore[arg-type]
                both.model,
                seed=seed,
                shares_load=num_fronts > 1,
            )
            await front.start()
            stack.push_async_callback(front.close)
            both.fronts.append(front)
            if both.model.router_class is not None:
                await both.expect_lines(len(both.replicas), seed)
        yield both


def info_of(engine: AsyncEngine, config: EngineConfig) -> ReplicaInfo:
    """As `EngineReplica.describe` tells it."""
    return ReplicaInfo(
        version=__version__,
        config=config,
        max_model_len=engine.max_model_len,
        adapters=dict(engine.adapters.paths),
        adapter_ids=engine.adapters.ids,
        runner_info=engine.internals.runner_info,
        started_at=engine.started_at,
    )


async def whole(front: RayFront, prompt: Any, params: Any, **fields: Any) -> list[RequestOutput]:
    """What comes of a request, by sample."""
    found: dict[int, RequestOutput] = {}
    async with asyncio.timeout(60), await front.add_request(prompt, params, **fields) as stream:
        async for output in stream:
            if output.index in found:
                found[output.index].merge(output)
            else:
                found[output.index] = output
    return [found[index] for index in sorted(found)]


async def is_idle(both: Joined) -> None:
    """Return when no replica has a request, and no account of one is left."""
    async with asyncio.timeout(20):
        for replica in both.replicas:
            while (stats := replica.engine.get_stats()) and (  # noqa: ASYNC110
                stats.num_running_reqs or stats.num_waiting_reqs or stats.num_used_kv_blocks
            ):
                await asyncio.sleep(0.005)
    for front in both.fronts:
        assert not front._calls
        assert not front.request_ids
