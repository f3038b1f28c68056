"""The engine as the ingress sees it: any of the replicas of one model, behind a router.

Its deployments say which replica is where.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
from ray.serve.handle import DeploymentHandle

from aioserve.config import EngineConfig
from aioserve.engine.client import EngineClient
from aioserve.engine.clock import Clock, clock_of
from aioserve.engine.input_processor import InputProcessor, PoolingValidator
from aioserve.engine.operations import AbortElsewhere, EngineCommand, HealthCheck, ShowMetrics
from aioserve.engine.operations.command import Answer, Health
from aioserve.engine.stream import Claims, RequestStream, Samples
from aioserve.errors import EngineDeadError, RequestError
from aioserve.fleet.ray.call import Call, Mover
from aioserve.fleet.ray.chooser import Chooser, OwnChooser, RayChooser, RouterMetrics, render
from aioserve.fleet.ray.fleet import Fleet, Tickets, deployment_key, subscribe, unsubscribe
from aioserve.fleet.ray.kv_feed import model_of
from aioserve.fleet.ray.replica import ReplicaInfo
from aioserve.fleet.ray.settings import ModelSettings
from aioserve.fleet.routing import Dispatcher, RoutedRequest, load_router, short_name
from aioserve.fleet.workers.remote_engine import KnownAdapters, RemoteDelivery
from aioserve.kv_cache.block_pool import hash_blocks
from aioserve.model_source.info import ModelInfo
from aioserve.request import SESSION, Request, RequestSpec
from aioserve.support import __version__

logger = logging.getLogger(__name__)

ASK_AGAIN_SECONDS = 0.2  # after a replica with other settings has answered
PATIENCE_SECONDS = 30.0  # after which the log says that no replica has started


class ReplicaGroups:
    """The groups of replicas as one front end knows them."""

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
        """Return the role of a replica that has been told of."""
        for role, tickets in zip(self._roles, self._tickets, strict=True):
            if name in tickets:
                return role
        return ""

    async def describe(self, model: str) -> ReplicaInfo:
        """Return what all replicas can do, once each group has one with the settings and version of
        this ingress. While an application changes there are others, and what they say does not
        last.
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
        """Return what a replica of each group says of itself."""
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


# The engine as the ingress sees it: any of the replicas of one model, behind a router. Tokenizes,
# looks for prefixes, and makes text of tokens; steps are the replicas'. Knows no HTTP.


HEALTH_SECONDS = 5.0  # in which a replica says that it is there. A guess

# Blocks of a prompt that are hashed before others have a turn on the loop: 2 ms, a guess.
BLOCKS_AT_ONCE = 1_000


class RayParts(NamedTuple):
    """The parts of a front end."""

    info: ReplicaInfo
    adapters: KnownAdapters
    input_processor: InputProcessor
    pooling: PoolingValidator
    clock: Clock
    delivery: RemoteDelivery
    fleet: Fleet
    chooser: Chooser
    metrics: RouterMetrics
    mover: Mover

    @property
    def claims(self) -> Claims:
        """The ids that requests of this front end have taken."""
        return self.delivery.processor.claims


class RayFront(EngineClient):
    """A front end that serves requests from any number of tasks of one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        handles: Sequence[DeploymentHandle],
        model: ModelSettings,
        *,
        seed: int,
        group_configs: Sequence[EngineConfig] = (),
        shares_load: bool = False,
    ) -> None:
        """`config` is that of the replicas, each of `handles` leads to a group of them, which has
        the settings of `group_configs` if they differ, and `model` says which groups there are,
        behind which router. Of front ends with the same `seed`, all would draw the same. With
        `shares_load` others are told what this one sends, and it hears of theirs. `start` comes
        first.
        """
        self.config = config
        self.model_info = ModelInfo(config.model)
        self.max_model_len = 0
        self.started_at = 0
        configs = group_configs or [config] * len(handles)
        self._groups = ReplicaGroups(handles, model, configs)
        self._model = model
        self._hashes = config.cache.enable_prefix_caching and model.wants_hashes
        self._seed = seed
        self._shares_load = shares_load
        self._parts: RayParts | None = None
        self._calls: dict[str, Call] = {}

    @property
    def adapters(self) -> KnownAdapters:
        return self._alive().adapters

    @property
    def fleet(self) -> Fleet:
        """The lines to replicas. Raises `EngineDeadError` before the start."""
        return self._alive().fleet

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher, which knows the replicas. Raises `EngineDeadError` before the start, and
        where a router of Ray's chooses.
        """
        if (dispatcher := self.fleet.dispatcher) is None:
            raise EngineDeadError("a router of Ray's chooses, which keeps account of its own")
        return dispatcher

    @property
    def router_metrics(self) -> RouterMetrics:
        """The metrics of the router. Raises `EngineDeadError` before the start."""
        return self._alive().metrics

    @property
    def request_ids(self) -> list[str]:
        """Ids that requests of this front end, and their samples, have taken."""
        return self._alive().claims.ids()

    async def start(self) -> None:
        """Ask a replica with the same settings and version what they all are, and return when one
        can be sent requests.
        """
        info = await self._groups.describe(self.config.model.served_name)
        self.max_model_len, self.started_at = info.max_model_len, info.started_at
        loop = asyncio.get_running_loop()
        clock = clock_of(loop)
        delivery = RemoteDelivery(self.model_info.tokenizer, clock)
        chooser: Chooser
        router = short_name(self._model.router)
        served_name = self.config.model.served_name
        metrics = RouterMetrics(served_name, router, lambda: len(fleet.lines))
        if self._model.router_class is None:
            fleet = Fleet(delivery, clock, None, model=model_of(self.config))
            chooser = RayChooser(self._groups.handles[0], fleet, metrics)
        else:
            kind = load_router(self._model.router)
            dispatcher = Dispatcher(kind, self._model.router_options, seed=self._seed, clock=clock)
            fleet = Fleet(
                *(delivery, clock, dispatcher),
                model=model_of(self.config),
                shares_load=self._shares_load,
                role_of=self._groups.role_of,
            )
            most = self._model.max_ongoing_requests
            chooser = OwnChooser(dispatcher, fleet, most, metrics)
        self._parts = RayParts(
            info,
            KnownAdapters(self.config.model.served_names, info.adapters),
            InputProcessor(
                self.model_info,
                info.max_model_len,
                self._seed,
                runner_info=info.runner_info,
            ),
            PoolingValidator(self.model_info, info.runner_info),
            clock,
            delivery,
            fleet,
            chooser,
            metrics,
            Mover(fleet.dispatcher, info.max_model_len),
        )
        self._loop = loop
        if self._model.router_class is not None:
            self._groups.subscribe(self._hear_of_replicas)
            await fleet.first()
            self._parts.mover.start(fleet, self._calls)

    async def close(self) -> None:
        """End all requests, and close the lines to all replicas. Idempotent."""
        parts = self._parts
        if parts is None:
            return
        if self._model.router_class is not None:
            self._groups.unsubscribe()
            parts.mover.close()
        for call in list(self._calls.values()):
            call.stop(EngineDeadError("the ingress has ended"))
        self._parts = None
        await parts.fleet.close()
        parts.input_processor.close()
        self._close_chat_format()

    def _hear_of_replicas(self, tickets: dict[str, str]) -> None:
        """On the thread of Ray's router."""
        if (parts := self._parts) is not None:
            with suppress(RuntimeError):  # our loop has ended
                self._loop.call_soon_threadsafe(parts.fleet.update, tickets)

    def abort_now(self, request_id: str) -> bool:
        return self._parts is not None and self._abort_if_here(request_id, self._parts.claims)

    async def ask(self, command: EngineCommand[Answer]) -> Answer:
        """Health, and what other front ends have. Raises `RequestError` for what an operator does
        through Ray instead.
        """
        answer: Any
        if isinstance(command, HealthCheck):
            answer = await self._ask_health()
        elif isinstance(command, AbortElsewhere):
            answer = False
        elif isinstance(command, ShowMetrics):
            answer = render([self.router_metrics], command.counted)
        else:
            raise RequestError(
                f"{type(command).__name__} is not served in front of replicas on Ray, which has "
                "ways of its own: see docs/ray.md"
            )
        return cast(Answer, answer)

    async def _ask_health(self) -> Health:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await self._groups.ask_all()
        except Exception as error:
            return Health("silent", f"no replica answers ({type(error).__name__})")
        return Health()

    async def _submit(
        self,
        spec: RequestSpec,
        samples: Samples,
        stream: RequestStream,
        adapter: str,
        seconds: float | None,
    ) -> None:
        parts = self._alive()
        routed = await self._routed(spec, adapter, parts)

        def on_end() -> None:
            if self._calls.get(spec.request_id) is call:
                del self._calls[spec.request_id]

        call = parts.mover.make_call(
            parts.chooser,
            spec,
            *(parts.delivery, parts.clock, spec, samples, adapter, routed, stream, on_end),
            parts.metrics.on_resent,
        )
        self._calls[spec.request_id] = call
        if samples.is_aborted:
            call.let_go()
        samples.let_go = call.let_go
        try:
            await call.begin()
        finally:
            samples.let_go = None

    def _drop(self, samples: Samples) -> None:
        if (parts := self._parts) is None:
            return  # closed: all requests have ended
        if parts.claims.samples_of(samples.request_id) is not samples:
            return  # it has ended
        if (call := self._calls.get(samples.request_id)) is not None:
            call.drop()
        parts.delivery.processor.drop(samples, parts.clock())

    def _abort(self, samples: Samples) -> bool:
        call = self._calls.get(samples.request_id)
        return call is not None and call.abort()

    async def _routed(self, spec: RequestSpec, adapter: str, parts: RayParts) -> RoutedRequest:
        num_tokens, size = len(spec.prompt_token_ids), self.config.cache.block_size
        hashes: Sequence[bytes] = ()
        if self._hashes:
            adapter_id = parts.info.adapter_ids.get(adapter, "")
            request = Request(msgspec.structs.replace(spec, adapter_id=adapter_id))
            num_blocks = num_tokens // size
            for num_hashed in range(0, num_blocks, BLOCKS_AT_ONCE):
                if num_hashed:
                    await asyncio.sleep(0)
                hash_blocks(request, min(num_hashed + BLOCKS_AT_ONCE, num_blocks), size)
            hashes = tuple(request.block_hashes)
        session = spec.hints.get(SESSION)
        return RoutedRequest(
            request_id=spec.request_id,
            num_tokens=num_tokens,
            max_tokens=spec.sampling_params.max_tokens,
            arrival_time=spec.arrival_time,
            deadline=spec.deadline,
            user=spec.user,
            priority=spec.priority,
            session=session if isinstance(session, str) else spec.user,
            adapter=adapter,
            hints=spec.hints,
            block_hashes=hashes,
            block_size=size if hashes else 0,
        )

    def _alive(self) -> RayParts:
        if self._parts is None:
            raise EngineDeadError("the front end has not been started")
        return self._parts
