"""Requests that are not in the queue yet: tokenized, compiled, waiting for their adapter.

They wait as those in the queue do, and count as that. Knows how many there are; knows no order.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from aioserve.engine.admission.image_memory import ImageMemory
from aioserve.engine.admission.input_processor import InputProcessor
from aioserve.engine.clock import Clock
from aioserve.engine.control.adapters import Adapters
from aioserve.engine.core import EngineCore
from aioserve.engine.observe.metrics import EngineMetrics
from aioserve.engine.samples import Samples
from aioserve.errors import EngineOverloadedError
from aioserve.request import Request, RequestSpec, RequestStatus

# A client that is refused hears when to come again: not at once, and not so late that the server
# idles when its load was a peak. Guesses.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


class Admission:
    """Admits the requests of one engine: counts arriving ones and prepares their inputs."""

    def __init__(
        self,
        input_processor: InputProcessor,
        adapters: Adapters,
        core: EngineCore,
        metrics: EngineMetrics,
        clock: Clock,
        image_memory: ImageMemory,
    ) -> None:
        self._input_processor = input_processor
        self._adapters = adapters
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._image_memory = image_memory
        self.num_arriving = 0  # requests that are arriving now
        self.num_tokens = 0  # a lower bound of their prompts' tokens

    @contextmanager
    def counted(self, num_tokens: int) -> Iterator[None]:
        """Count one more arriving request, of at least `num_tokens`, inside the block. Raises
        `EngineOverloadedError`, before the work is done, if that is too much for the queue.
        """
        try:
            self._core.loop.scheduler.check_queue(num_tokens, self.num_arriving, self.num_tokens)
            self.num_arriving += 1
            self.num_tokens += num_tokens
            try:
                yield
            finally:
                self.num_arriving -= 1
                self.num_tokens -= num_tokens
        except EngineOverloadedError as error:
            error.retry_after = self._estimate_wait()
            raise

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
            await self._adapters.hold(samples, adapter, seconds)
        if samples.adapter_id:
            return msgspec.structs.replace(spec, adapter_id=samples.adapter_id)
        return spec

    def enter(
        self, spec: RequestSpec, samples: Samples, register: Callable[[Request, int], None]
    ) -> None:
        """Into the queue; `register` is called with each sample, and its number, that is there.
        Raises what the scheduler raises.
        """
        for index, own in enumerate(samples.specs(spec)):
            request = Request(own)
            self._core.add_request(request)
            try:
                register(request, index)
            except BaseException:
                self._core.finish_requests([request.request_id], RequestStatus.FINISHED_ERROR)
                raise
        self._metrics.on_accepted(spec)

    def _estimate_wait(self) -> float:
        """Seconds until today's queue is served, at the recent rate of prompt tokens."""
        stats = self._core.loop.scheduler.make_stats()
        rate = self._metrics.prompt_token_rate.per_second(self._clock())
        if stats is None or rate <= 0:
            return MIN_RETRY_SECONDS
        seconds = (stats.num_waiting_tokens + self.num_tokens) / rate
        return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
