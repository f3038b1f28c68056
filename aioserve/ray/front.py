"""The engine as the ingress sees it: any of the replicas of one model, behind Ray's router.

Tokenizes, so that the router can look for prefixes; text is made in the replica. Knows no HTTP.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast
from uuid import uuid4

from ray.serve.handle import DeploymentHandle

from aioserve.config import EngineConfig
from aioserve.engine.client import Answer, EngineClient
from aioserve.engine.input_processor import InputProcessor, Prompt
from aioserve.engine.pooling import NOTHING_SAMPLED, PoolingDoor
from aioserve.engine.questions import AbortElsewhere, Health, HowAreYou, Question
from aioserve.engine.stream import RequestStream
from aioserve.errors import (
    ConfigError,
    EngineDeadError,
    RequestError,
    RequestIdInUseError,
    UnknownModelError,
)
from aioserve.kv_cache.hashing import hash_blocks
from aioserve.model_info import ModelInfo
from aioserve.pooling_params import PoolingParams
from aioserve.ray.call import Call
from aioserve.ray.replica import ReplicaInfo
from aioserve.ray.route import Route
from aioserve.request import Request, RequestSpec
from aioserve.routing import RoutedRequest
from aioserve.sampling_params import SamplingParams
from aioserve.version import __version__

HEALTH_SECONDS = 5.0  # in which a replica says that it is there. A guess


class _Adapters:
    """Those of the settings: every replica has loaded them at its start."""

    def __init__(self, config: EngineConfig) -> None:
        self._served_name = config.model.served_name
        pairs = [spec.partition("=") for spec in config.adapters.lora]
        self.paths: Mapping[str, Path] = {name: Path(path) for name, _, path in pairs}

    def check_name(self, name: str) -> None:
        if name != self._served_name and name not in self.paths:
            known = ", ".join([self._served_name, *self.paths])
            raise UnknownModelError(f"there is no model {name!r}, but {known}", param="model")


class _Parts(NamedTuple):
    input_processor: InputProcessor
    pooling: PoolingDoor


class RayFront(EngineClient):
    """Serves requests from any number of tasks of one event loop."""

    def __init__(self, config: EngineConfig, handle: DeploymentHandle) -> None:
        """`config` is that of the replicas; `handle` leads to them. `start` comes first."""
        self.config = config
        self.model_info = ModelInfo(config.model)
        self.max_model_len = 0
        self.started_at = 0
        self.adapters_served = _Adapters(config)
        self._handle = handle
        self._info: ReplicaInfo | None = None
        self._parts: _Parts | None = None
        self._calls: dict[str, Call | None] = {}  # None: not accepted yet

    @property
    def adapters(self) -> _Adapters:
        return self.adapters_served

    async def start(self) -> None:
        """Ask a replica what they all are. Raises `ConfigError` for one of another version."""
        info = await self._handle.describe.remote()
        if info.version != __version__:
            raise ConfigError(
                f"the replicas run aioserve {info.version}, the ingress {__version__}: give them "
                "the same environment"
            )
        self._info, self.max_model_len = info, info.max_model_len
        self.started_at = info.started_at
        self._parts = _Parts(
            InputProcessor(
                self.model_info,
                info.max_model_len,
                self.config.runner.seed,
                None,
                tells_prompts=info.tells_prompts,
            ),
            PoolingDoor(self.model_info, can_pool=info.can_pool),
        )

    async def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        timeout: float | None = None,  # noqa: ASYNC109 - of the request, not of this call
        cache_salt: str = "",
        adapter: str = "",
    ) -> RequestStream:
        """As `AsyncEngine.add_request`."""
        if timeout is not None and not timeout > 0:
            raise RequestError(f"timeout must be above 0 seconds, got {timeout}", param="timeout")
        processor, pooling = self._alive()
        request_id = request_id or f"req-{uuid4().hex}"
        if request_id in self._calls:
            raise RequestIdInUseError(f"request_id {request_id!r} belongs to a request in progress")
        began = asyncio.get_running_loop().time()
        complete: SamplingParams | PoolingParams
        if isinstance(params, PoolingParams):
            complete, n = pooling.complete(params), 1
        else:
            complete = processor.complete_params(params or SamplingParams())
            n = complete.n
        self._calls[request_id] = None
        try:
            room = processor.room(complete)
            processor.least_tokens(prompt, room)
            token_ids = await processor.tokenize(prompt, room)
            if timeout is not None:
                timeout = max(timeout - (asyncio.get_running_loop().time() - began), 1e-3)
            arguments = {
                "prompt": token_ids,
                "params": complete,
                "request_id": request_id,
                "priority": priority,
                "user": user,
                "timeout": timeout,
                "cache_salt": cache_salt,
                "adapter": adapter,
            }
            routed = self._routed(token_ids, cache_salt, adapter, user)
            call = Call(
                self._handle,
                arguments,
                lambda: Route(routed),
                request_id,
                n,
                on_end=lambda: self._calls.pop(request_id, None),
            )
            await call.begin()
        except BaseException:
            self._calls.pop(request_id, None)
            raise
        call.stream.prompt_token_ids = token_ids
        self._calls[request_id] = call
        return call.stream

    def abort(self, request_id: str) -> bool:
        call = self._calls.get(request_id)
        return call is not None and call.abort()

    async def ask(self, question: Question[Answer]) -> Answer:
        """Health, and what other front ends have. Raises `RequestError` for what an operator does
        through Ray instead.
        """
        answer: Any
        if isinstance(question, HowAreYou):
            answer = await self._ask_health()
        elif isinstance(question, AbortElsewhere):
            answer = False
        else:
            raise RequestError(
                f"{type(question).__name__} is not served in front of replicas: see docs/ray.md"
            )
        return cast(Answer, answer)

    async def _ask_health(self) -> Health:
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await self._handle.describe.remote()
        except Exception as error:
            return Health(cause_of_death=f"no replica answers ({type(error).__name__})")
        return Health()

    def _routed(
        self, token_ids: list[int], cache_salt: str, adapter: str, user: str
    ) -> RoutedRequest:
        assert self._info is not None
        spec = RequestSpec(
            "",
            token_ids,
            NOTHING_SAMPLED,
            cache_salt=cache_salt,
            adapter_id=self._info.adapter_ids.get(adapter, ""),
        )
        request, size = Request(spec), self.config.cache.block_size
        hash_blocks(request, len(token_ids) // size, size)
        return RoutedRequest(len(token_ids), tuple(request.block_hashes), size, user)

    def _alive(self) -> _Parts:
        if self._parts is None:
            raise EngineDeadError("the front end has not been started")
        return self._parts
