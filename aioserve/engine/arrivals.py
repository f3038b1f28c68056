"""Requests that are not in the queue yet: tokenized, compiled, waiting for their adapter.

They wait as those in the queue do, and count as that. Knows how many there are; knows no order.
"""

from aioserve.engine.adapters import Adapters
from aioserve.engine.clock import Clock
from aioserve.engine.core import EngineCore
from aioserve.engine.input_processor import InputProcessor, Prompt
from aioserve.engine.metrics import EngineMetrics
from aioserve.engine.samples import Samples
from aioserve.pooling_params import PoolingParams
from aioserve.sampling_params import SamplingParams

# A client that is refused hears when to come again: not at once, and not so late that the server
# idles when its load was a peak. Guesses.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 60.0


class Arrivals:
    """Of one engine."""

    def __init__(
        self,
        input_processor: InputProcessor,
        adapters: Adapters,
        core: EngineCore,
        metrics: EngineMetrics,
        clock: Clock,
    ) -> None:
        self._input_processor = input_processor
        self._adapters = adapters
        self._core = core
        self._metrics = metrics
        self._clock = clock
        self._num_arriving = 0
        self._arriving_tokens = 0  # of these, at least

    async def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        samples: Samples,
        adapter: str,
        seconds: float | None,
    ) -> list[int]:
        """Tokenizes, compiles what the text must look like, has the adapter brought, if there is a
        name, within so many seconds. Refuses what is too long, or too much for the queue, before
        the work is done.
        """
        room = self._input_processor.room(params)
        least = self._input_processor.least_tokens(prompt, room)
        self._core.scheduler.check_queue(least, self._num_arriving, self._arriving_tokens)
        self._num_arriving += 1
        self._arriving_tokens += least
        try:
            token_ids = await self._input_processor.tokenize(prompt, room)
            if isinstance(params, SamplingParams):
                await self._input_processor.check_grammar(params)
            if adapter:
                await self._adapters.hold(samples, adapter, seconds)
            return token_ids
        finally:
            self._num_arriving -= 1
            self._arriving_tokens -= least

    def estimate_wait(self) -> float:
        """Seconds until today's queue is served, if prompts go on being served as of late."""
        stats = self._core.scheduler.make_stats()
        rate = self._metrics.prompt_token_rate.per_second(self._clock())
        if stats is None or rate <= 0:
            return MIN_RETRY_SECONDS
        seconds = (stats.num_waiting_tokens + self._arriving_tokens) / rate
        return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
