"""The half of an engine that callers meet: from a prompt to a stream of its outputs.

The same in front of steps of this process, of another one, and of many. Knows no scheduler and no
steps.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    nullcontext,
)
from typing import Generic, Protocol, TypeVar
from uuid import uuid4

from aioserve.engine.admission.input_processor import Prompt
from aioserve.engine.admission.pooling_validator import NOTHING_SAMPLED
from aioserve.engine.client import DoorParts, EngineClient
from aioserve.engine.clock import Clock
from aioserve.engine.delivery.request_lines import log_prompt
from aioserve.engine.delivery.tracing import operation_of
from aioserve.engine.samples import Claims, Origin, Samples
from aioserve.engine.stream import RequestStream
from aioserve.errors import RequestError
from aioserve.params import PoolingParams, SamplingParams
from aioserve.request import NO_HINTS, Hints, RequestSpec

NO_HEADERS: Mapping[str, str] = {}


class FrontParts(DoorParts, Protocol):
    """The parts of a front end while it serves."""

    @property
    def claims(self) -> Claims: ...
    @property
    def clock(self) -> Clock: ...


Parts = TypeVar("Parts", bound=FrontParts)


class EngineClientBase(EngineClient, Generic[Parts]):
    """Checks requests and tokenizes their prompts, in this process."""

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
        hints: Hints = NO_HINTS,
        key_name: str = "",
        client: str = "",
        trace_headers: Mapping[str, str] = NO_HEADERS,
    ) -> RequestStream:
        """Admit a request and return its stream, as `EngineClient.add_request` says."""
        if timeout is not None and not timeout > 0:
            raise RequestError(f"timeout must be above 0 seconds, got {timeout}", param="timeout")
        parts = self._alive()
        arrival_time = parts.clock()  # before tokenizing: waiting for that is waiting, too
        sampling, pooling = NOTHING_SAMPLED, None
        if isinstance(params, PoolingParams):
            pooling = parts.pooling.complete(params)
        else:
            params = params or self.sampling_defaults.fill({})
            sampling = parts.input_processor.sampling.complete(params)
        request_id = request_id or f"req-{uuid4().hex}"
        if self.config.server.log_prompts:
            log_prompt(request_id, prompt, sampling)
        model, operation = self.config.model.served_name, ""
        if self.config.server.otlp_traces_endpoint is not None:
            operation = operation_of(prompt, is_pooled=pooling is not None)
        with self._claimed(request_id, sampling.n, parts) as samples:
            samples.origin = Origin(client, adapter or model, operation, dict(trace_headers))
            adapter = "" if adapter == model else adapter
            stream = RequestStream(request_id, sampling.n, abort=lambda: self._drop(samples, parts))
            room = parts.input_processor.room(pooling or sampling)
            least = parts.input_processor.least_tokens(prompt, room)
            with self._arriving(least, parts):
                encoded = await parts.input_processor.tokenize(prompt, room)
                stream.num_prompt_tokens = len(encoded.token_ids)
                stream.prompt_token_ids = encoded.token_ids
                spec = RequestSpec(
                    request_id,
                    encoded.token_ids,
                    sampling,
                    arrival_time=arrival_time,
                    eos_token_ids=self.model_info.eos_token_ids,
                    priority=priority,
                    user=user,
                    cache_salt=cache_salt,
                    encoder_inputs=encoded.encoder_inputs,
                    deadline=None if timeout is None else arrival_time + timeout,
                    pooling_params=pooling,
                    key_name=key_name,
                    hints=hints,
                )
                with encoded.named():
                    await self._submit(spec, samples, stream, adapter, timeout, parts)
        return stream

    def arriving(self) -> AbstractAsyncContextManager[object]:
        """Do nothing: a front end that does not know the queue counts no arriving request."""
        return nullcontext()

    @abstractmethod
    def _alive(self) -> Parts:
        """The parts that serve requests. Raises `EngineDeadError` if that is not the time."""

    def _arriving(self, num_tokens: int, parts: Parts) -> AbstractContextManager[None]:
        """Inside the block a request of `num_tokens` tokens or more is tokenized and added. May
        raise `EngineOverloadedError`, where it is known whether there is room in the queue.
        """
        return nullcontext()

    @abstractmethod
    async def _submit(
        self,
        spec: RequestSpec,
        samples: Samples,
        stream: RequestStream,
        adapter: str,
        seconds: float | None,
        parts: Parts,
    ) -> None:
        """Hand a request over; returns when it is accepted; its outputs go to `stream`.
        `seconds` bounds the waiting for the adapter.
        """

    @abstractmethod
    def _drop(self, samples: Samples, parts: Parts) -> None:
        """Drop a request whose reader has left, possibly after its end."""

    @abstractmethod
    def _abort(self, samples: Samples, parts: Parts) -> bool:
        """Abort requests; returns whether any really ended by this call."""

    @contextmanager
    def _claimed(self, request_id: str, n: int, parts: Parts) -> Iterator[Samples]:
        """Claim the ids of a request inside the block, where it is accepted or dropped."""
        samples = parts.claims.claim(request_id, n)
        try:
            yield samples
        except BaseException:
            self._drop(samples, parts)
            raise
        samples.is_arriving = False
        if samples.is_aborted:
            self._abort(samples, parts)

    def _abort_if_here(self, request_id: str, parts: Parts) -> bool:
        samples = parts.claims.samples_of(request_id)
        if samples is not None and samples.is_arriving:
            samples.is_aborted = True
            if samples.let_go is not None:
                samples.let_go()
            return True
        return samples is not None and self._abort(samples, parts)
