"""Requests that are not in the queue yet: tokenized, compiled, waiting for their adapter.

They wait as those in the queue do, and count as that, and so do the bytes of their images. Knows
how many there are; knows no order.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from aioserve.config import EngineConfig
from aioserve.engine.clock import Clock
from aioserve.engine.core import EngineCore
from aioserve.engine.input_processor import InputProcessor
from aioserve.engine.metrics import EngineMetrics
from aioserve.engine.stream import Samples
from aioserve.errors import EngineOverloadedError
from aioserve.request import Request, RequestSpec, RequestStatus
from aioserve.support.parts import load

if TYPE_CHECKING:
    from aioserve.engine.adapters import Adapters
    from aioserve.engine.queue_shares import QueueShares


# A client that is refused hears when to come again: not at once, and not so late that the server
# idles when its load was a peak. Guesses.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


class _Arrival(NamedTuple):
    admission: "Admission"
    num_tokens: int

    def __enter__(self) -> None:
        self.admission.add(1, self.num_tokens)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.admission.add(-1, -self.num_tokens)
        if isinstance(error, EngineOverloadedError):
            self.admission.say_when(error)


class Admission:
    """The way into one engine: arriving requests are counted, and their inputs prepared."""

    def __init__(
        self,
        input_processor: InputProcessor,
        adapters: "Callable[[], Adapters]",
        core: EngineCore,
        metrics: EngineMetrics,
        clock: Clock,
        config: EngineConfig,
    ) -> None:
        """`adapters` is asked with the first request that has one."""
        self._input_processor = input_processor
        self._adapters = adapters
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._config = config
        self.num_arriving = 0  # requests that are arriving now
        self.num_tokens = 0  # a lower bound of their prompts' tokens

    @cached_property
    def _image_memory(self) -> Any:  # loaded with the first images
        return load("media", "memory")(self._config.images.image_memory_gib)

    @cached_property
    def _shares(self) -> "QueueShares":  # loaded with the first request that has a key
        from aioserve.engine.queue_shares import QueueShares

        return QueueShares(self._config)

    def counted(self, num_tokens: int) -> "_Arrival":
        """Count one more arriving request, of at least `num_tokens`, inside the block. Entering it
        raises `EngineOverloadedError`, before the work is done, if that is too much for the queue.
        """
        return _Arrival(self, num_tokens)

    def add(self, num_requests: int, num_tokens: int) -> None:
        """Count more or fewer that arrive. Raises `EngineOverloadedError` for more, which says when
        to come again.
        """
        if num_requests > 0:
            check_queue = self._core.loop.scheduler.check_queue
            try:
                check_queue(num_tokens, self.num_arriving, self.num_tokens)
            except EngineOverloadedError as error:
                self.say_when(error)
                raise
        self.num_arriving += num_requests
        self.num_tokens += num_tokens

    def say_when(self, error: EngineOverloadedError) -> None:
        """Let a refusal say when to come again."""
        error.retry_after = self._estimate_wait()

    async def prepare(
        self, spec: RequestSpec, samples: Samples, adapter: str, seconds: float | None
    ) -> RequestSpec:
        """Count the request's images, compile its grammar, and load its adapter before the timeout:
        each if the request has one. Returns what is asked for then, in full. Raises what these do,
        `EngineOverloadedError` for images that are too many.
        """
        if spec.encoder_inputs:
            self._image_memory.hold(spec)
        await self._input_processor.check_grammar(spec.sampling_params)
        if adapter:
            await self._adapters().hold(samples, adapter, seconds)
        if samples.adapter_id:
            return msgspec.structs.replace(spec, adapter_id=samples.adapter_id)
        return spec

    def enter(
        self, spec: RequestSpec, samples: Samples, register: Callable[[Request, int], None]
    ) -> None:
        """Into the queue; `register` is called with each sample, and its number, that is there.
        Raises what the scheduler raises, and `KeyLimitError` beyond the key's share of the queue.
        """
        if spec.key_name:
            self._shares.check(spec)
        for index, own in enumerate(samples.specs(spec)):
            request = Request(own)
            self._core.add_request(request)
            try:
                register(request, index)
            except BaseException:
                self._core.loop.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR)
                raise
            if spec.key_name:
                self._shares.add(request)
        self._metrics.on_accepted(spec)

    def left_queue(self, request: Request) -> None:
        """Note that a step has a sequence for the first time, or that it has ended before."""
        if request.spec.key_name:
            self._shares.leave(request)

    def _estimate_wait(self) -> float:
        """Return seconds until today's queue is served, at the recent rate of prompt tokens."""
        stats = self._core.loop.scheduler.make_stats()
        rate = self._metrics.prompt_token_rate.per_second(self._clock())
        if stats is None or rate <= 0:
            return MIN_RETRY_SECONDS
        seconds = (stats.num_waiting_tokens + self.num_tokens) / rate
        return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
