"""The engine as the ingress sees it: any of the replicas of one model, behind Ray's router.

Tokenizes, so that the router can look for prefixes; text is made in the replica. Knows no HTTP.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import msgspec
from ray.serve.handle import DeploymentHandle

from aioserve.config import EngineConfig
from aioserve.engine.admission.input_processor import InputProcessor
from aioserve.engine.admission.multimodal_prompts import Encoded
from aioserve.engine.admission.pooling_validator import PoolingValidator
from aioserve.engine.client import KnownAdapters
from aioserve.engine.client_base import EngineClientBase
from aioserve.engine.clock import Clock, clock_of
from aioserve.engine.samples import Claims, Samples
from aioserve.engine.stream import RequestStream
from aioserve.errors import ConfigError, EngineDeadError, RequestError
from aioserve.hints import SESSION
from aioserve.kv_cache.hashing import hash_blocks
from aioserve.model_info import ModelInfo
from aioserve.operations import AbortElsewhere, EngineCommand, HealthCheck
from aioserve.operations.answers import Health
from aioserve.operations.command import Answer
from aioserve.ray.call import Call, TimeLeft
from aioserve.ray.replica import ReplicaInfo
from aioserve.request import Request, RequestSpec
from aioserve.routing import RoutedRequest
from aioserve.version import __version__

logger = logging.getLogger(__name__)

HEALTH_SECONDS = 5.0  # in which a replica says that it is there. A guess
PATIENCE_SECONDS = 30.0  # after which the log says that no replica has started

# Blocks of a prompt that are hashed before others have a turn on the loop: 2 ms, a guess.
BLOCKS_AT_ONCE = 1_000


class RayParts(NamedTuple):
    """What a front end is made of."""

    info: ReplicaInfo
    adapters: KnownAdapters
    input_processor: InputProcessor
    pooling: PoolingValidator
    clock: Clock
    claims: Claims


class RayFront(EngineClientBase[RayParts]):
    """Serves requests from any number of tasks of one event loop."""

    def __init__(
        self, config: EngineConfig, handle: DeploymentHandle, *, hashes: bool, seed: int
    ) -> None:
        """`config` is that of the replicas; `handle` leads to them, by a router that wants `hashes`
        or not. Of front ends with the same `seed`, all would draw the same. `start` comes first.
        """
        self.config = config
        self.model_info = ModelInfo(config.model)
        self.max_model_len = 0
        self.started_at = 0
        self._handle = handle
        self._hashes = hashes
        self._seed = seed
        self._parts: RayParts | None = None
        self._calls: dict[str, Call] = {}

    @property
    def adapters(self) -> KnownAdapters:
        return self._alive().adapters

    async def start(self) -> None:
        """Ask a replica what they all are. Raises `ConfigError` for one of another version."""
        info = await self._ask_first()
        if info.version != __version__:
            raise ConfigError(
                f"the replicas run aioserve {info.version}, the ingress {__version__}: give them "
                "the same environment"
            )
        self.max_model_len, self.started_at = info.max_model_len, info.started_at
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
            clock_of(asyncio.get_running_loop()),
            Claims(),
        )

    async def _ask_first(self) -> ReplicaInfo:
        asking = asyncio.ensure_future(self._handle.describe.remote())
        while not (await asyncio.wait([asking], timeout=PATIENCE_SECONDS))[0]:
            logger.warning(
                "no replica of %r has started yet: `serve status` and `ray status` say why",
                self.config.model.served_name,
            )
        return cast(ReplicaInfo, asking.result())

    def abort(self, request_id: str) -> bool:
        return self._parts is not None and self._abort_if_here(request_id, self._parts)

    async def ask(self, command: EngineCommand[Answer]) -> Answer:
        """Health, and what other front ends have. Raises `RequestError` for what an operator does
        through Ray instead.
        """
        answer: Any
        if isinstance(command, HealthCheck):
            answer = await self._ask_health()
        elif isinstance(command, AbortElsewhere):
            answer = False
        else:
            raise RequestError(
                f"{type(command).__name__} is not served in front of replicas on Ray, which has "
                "ways of its own: see docs/ray.md"
            )
        return cast(Answer, answer)

    async def _ask_health(self) -> Health:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await self._handle.describe.remote()
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
        parts: RayParts,
    ) -> None:
        images, token_ids = spec.encoder_inputs, spec.prompt_token_ids
        arguments = {
            "prompt": Encoded(list(token_ids), images) if images else token_ids,
            "params": spec.pooling_params or spec.sampling_params,
            "request_id": spec.request_id,
            "priority": spec.priority,
            "user": spec.user,
            "timeout": None if spec.deadline is None else TimeLeft(spec.deadline),
            "cache_salt": spec.cache_salt,
            "hints": spec.hints,
            "adapter": adapter,
            "client": samples.origin.client,
            "trace_headers": samples.origin.trace_headers,
        }
        routed = await self._routed(spec, adapter, parts)

        def on_end() -> None:
            if parts.claims.release(samples):
                del self._calls[spec.request_id]

        call = Call(self._handle, arguments, routed, stream, len(samples.ids), on_end)
        self._calls[spec.request_id] = call
        if samples.is_aborted:
            call.let_go()
        samples.let_go = call.let_go
        try:
            await call.begin()
        finally:
            samples.let_go = None

    def _drop(self, samples: Samples, parts: RayParts) -> None:
        if parts.claims.release(samples):
            call = self._calls.pop(samples.request_id, None)
            if call is not None:
                call.drop()

    def _abort(self, samples: Samples, parts: RayParts) -> bool:
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
