"""What an operator can do to an engine: switch its policy, pause it, have it sleep, reload weights.

Does each of them whole, also if its caller leaves. Knows nothing about how an engine starts.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from aioserve.config import EngineConfig
from aioserve.engine.adapters import Adapters
from aioserve.engine.builder import EngineBuilder, EngineParts, check_row_values
from aioserve.engine.control import Control
from aioserve.engine.observed_engine import ObservedEngine
from aioserve.errors import EngineDeadError
from aioserve.operations.command import Answer, Arrivals, EngineCommand, Running
from aioserve.outputs import FinishReason
from aioserve.request import RequestStatus
from aioserve.scheduler import load_policy

logger = logging.getLogger(__name__)


class OperatedEngine(ObservedEngine):
    """An engine as its operator meets it: what commands do between two steps."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        super().__init__(config)
        self._adapters: Adapters | None = None
        self._builder: EngineBuilder | None = None
        self._task: asyncio.Task[None] | None = None
        self._doings: set[asyncio.Task[None]] = set()  # of an operator, that are not done

    @property
    def adapters(self) -> Adapters:
        """The LoRA adapters: ask for them, load and unload them. There are none before a start:
        raises `EngineDeadError`.
        """
        if self._adapters is None:
            raise EngineDeadError("the engine has not been started")
        return self._adapters

    async def ask(self, command: EngineCommand[Answer]) -> Answer:
        return await command.run_on(self)

    def switch_policy(self, policy: str, options: dict[str, Any] | None = None) -> None:
        """Change the policy between two steps; queue, running requests and KV cache stay.

        Raises `ConfigError` for a policy, option or limit that cannot work, and `PolicyError` if
        the new policy cannot order the requests that are there. The old one goes on then.
        """
        parts = self._alive()
        settings = msgspec.structs.replace(
            self.config.scheduler, policy=policy, options=options or {}
        )
        check_row_values(load_policy(policy), parts.runner_info)
        parts.core.switch(settings)
        self.config = msgspec.structs.replace(self.config, scheduler=settings)
        logger.info("policy is now %s %s", policy, options or {})

    def switch_shadow(self, policy: str | None, options: dict[str, Any] | None = None) -> None:
        """Have another policy evaluated on the traffic from now on, or none. Raises `ConfigError`;
        what there was goes on then.
        """
        parts = self._alive()
        shadow = msgspec.structs.replace(
            self.config.shadow, shadow_policy=policy, shadow_options=options or {}
        )
        config = msgspec.structs.replace(self.config, shadow=shadow)
        assert self._builder is not None
        turns = self._builder.shadows.follow(
            parts.core.loop, config, parts.runner_info, parts.max_model_len, parts.shadow_turns
        )
        self.config, self._parts = config, parts._replace(shadow_turns=turns)
        logger.info("shadow policy is now %s %s", policy, options or {})

    async def pause(self, *, running: Running = "keep", arrivals: Arrivals = "wait") -> None:
        """Return when no step is computed, and none will be until `resume`.

        `running`: what becomes of requests that run or wait; kept ones go on with the same tokens.
        `arrivals`: whether those that come meanwhile wait, in the queue and its limits, or get
        `EnginePausedError`. Deadlines and queue timeouts pass.
        """
        await self._controlled(self._controls().pause(running, arrivals))

    async def resume(self) -> None:
        """End a pause. Does nothing while the engine runs. Raises `ConfigError` while it sleeps."""
        await self._controlled(self._controls().resume())

    async def sleep(
        self, *, weights: bool = False, running: Running = "keep", arrivals: Arrivals = "wait"
    ) -> None:
        """Pause and free the memory of the KV cache, with `weights` that of the model as
        well. Kept requests are computed again after `wake`. Raises `ConfigError` where that is not
        served: on a CUDA device; nothing has changed then.
        """
        await self._controlled(self._controls().sleep(running, arrivals, frees_weights=weights))

    async def wake(self) -> None:
        """Allocate what `sleep` freed, and go on. Raises `ConfigError`; it sleeps on then."""
        await self._controlled(self._controls().wake())

    async def reload(self, path: str, *, running: Running = "keep") -> None:
        """Serve the weights of a model directory which is the same but for them; cached prefixes
        are forgotten. Kept requests go on after their tokens so far. Raises `ConfigError` if they
        cannot be read, are of another model, or have no room beside the old ones, which serve on.
        """
        await self._controlled(self._controls().reload(path, running))

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; True if the KV cache is now empty."""
        parts = self._alive()
        is_empty = parts.core.loop.scheduler.reset_prefix_cache()
        if parts.kv_events is not None:
            parts.kv_events.deliver()
        return is_empty

    def _controls(self) -> Control:
        parts = self._alive()
        if self._control is None:
            assert self._runner is not None
            self._control = Control(
                self.config, parts.core, self._runner, self.adapters, lambda: self._end(None, parts)
            )
        return self._control

    async def _controlled(self, doing: Coroutine[Any, Any, None]) -> None:
        """Wait for it, but not for an engine that has ended: raises `EngineDeadError` then. It is
        done whole, also if its caller leaves.
        """
        assert self._task is not None
        task = asyncio.create_task(doing)
        self._doings.add(task)
        task.add_done_callback(self._forget_doing)
        await asyncio.wait({task, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self._alive()
        await task

    def _forget_doing(self, task: asyncio.Task[None]) -> None:
        self._doings.remove(task)
        if not task.cancelled():
            task.exception()  # the caller may have left

    def _end(self, request_ids: list[str] | None, parts: EngineParts) -> bool:
        """Abort requests, all if None; returns whether any really ended by this call."""
        ended = parts.core.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        parts.output_processor.end_requests(ended, FinishReason.ABORT, parts.clock())
        return bool(ended)
