"""A trace of each request for OpenTelemetry: queued, prefilled, decoded, preempted, paused.

Spans are made when the request has ended, of times that the engine knows anyway. Names are those of
the semantic conventions for generative AI where these have one. Knows no HTTP; the SDK is imported
only where traces are wanted.
"""

import asyncio
import contextlib
import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from aioserve.engine.prompt import Conversation, Encoded, MultimodalPrompt
from aioserve.engine.step_loop import StepObserver
from aioserve.engine.stream import SampleState
from aioserve.errors import ConfigError
from aioserve.outputs import FinishReason
from aioserve.request import Request
from aioserve.scheduler import SchedulerOutput
from aioserve.support import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span


logger = logging.getLogger(__name__)

# Notes of each request when a piece of its prompt was planned, and when it left and came back.
# Observes the step loop only where traces are wanted. Knows no spans: `Tracing` makes them when a
# request has ended, and takes its notes away.


class Chunk(NamedTuple):
    """A piece of a prompt, or of what is computed again, in a step. Times are the scheduler's."""

    time: float  # when the step was planned
    step_id: int
    num_tokens: int
    num_computed: int  # before it, cached ones included


class Timeline:
    """The life of one request, step by step, for its trace."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.chunks: list[Chunk] = []
        self.left: list[tuple[str, float]] = []  # how it left the batch, and when
        self.resumed: list[float] = []  # when it came back; not yet, after the last of `left`

    def leave(self, name: str, now: float) -> None:
        """The request is "preempted" or "paused" (`name`), or preempted after it was paused."""
        if len(self.left) > len(self.resumed):
            self.resumed.append(now)
        self.left.append((name, now))


class Timelines(StepObserver):
    """The notes on all requests of one engine whose traces are not made yet."""

    def __init__(self) -> None:
        self._timelines: dict[str, Timeline] = {}
        # Those timelines whose requests' prompts are not computed yet.
        self._prefilling: dict[str, Timeline] = {}

    def take(self, request_id: str) -> Timeline | None:
        """Return the notes on a request that has ended; None if it was never accepted."""
        self._prefilling.pop(request_id, None)
        return self._timelines.pop(request_id, None)

    def on_added(self, request: Request, now: float) -> None:
        self._timelines[request.request_id] = Timeline(request)

    def on_planned(self, output: SchedulerOutput, now: float) -> None:
        if not (self._prefilling or output.scheduled_new_reqs or output.preempted_req_ids):
            return
        for request_id in output.preempted_req_ids:
            self._prefilling.pop(request_id, None)
            if (timeline := self._timelines.get(request_id)) is not None:
                is_paused = request_id in output.paused_req_ids
                timeline.leave("paused" if is_paused else "preempted", now)
        for new in output.scheduled_new_reqs:
            if (timeline := self._timelines.get(new.request_id)) is not None:
                self._prefilling[new.request_id] = timeline
                if timeline.left:
                    timeline.resumed.append(now)
        for request_id, timeline in list(self._prefilling.items()):
            if (num_tokens := output.num_scheduled_tokens.get(request_id)) is None:
                continue
            request = timeline.request
            end = request.num_computed_tokens
            timeline.chunks.append(Chunk(now, output.step_id, num_tokens, end - num_tokens))
            if end >= request.num_tokens:
                del self._prefilling[request_id]


INSTALL_LINE = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"

# Seconds that the end of an engine waits for what is sent to the collector last.
CLOSE_SECONDS = 3.0

_PACKAGES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")


def check_installed() -> None:
    """Raises `ConfigError` where the extra is missing."""
    for name in _PACKAGES:
        try:
            is_there = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # a package above it
            is_there = False
        if not is_there:
            raise ConfigError(
                f"server.otlp_traces_endpoint needs OpenTelemetry ({name} is missing): "
                f"{INSTALL_LINE}"
            )


def make_exporter(endpoint: str) -> "SpanExporter":
    """Return what sends spans to a collector, by OTLP over HTTP, from a thread of its own."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)


def operation_of(prompt: Any, *, is_pooled: bool) -> str:
    """Return what the conventions call a request of this prompt."""
    if is_pooled:
        return "embeddings"
    if isinstance(prompt, MultimodalPrompt):
        prompt = prompt.prompt
    if isinstance(prompt, Conversation):
        return "chat"
    is_text = isinstance(prompt, str | Encoded) or all(isinstance(one, int) for one in prompt[:1])
    return "text_completion" if is_text else "chat"


class Tracing:
    """The traces of one engine, made of what its `timelines` have noted."""

    def __init__(
        self,
        exporter: "SpanExporter",
        timelines: Timelines,
        clock: Callable[[], float],
        model: str,
    ) -> None:
        """`clock` is the engine's, in seconds; `model` the name of what is served. Sampling, limits
        and the name of the service are the SDK's, from the environment (OTEL_...).
        """
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # not set
            resource = resource.merge(Resource({SERVICE_NAME: "aioserve"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("aioserve", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._timelines = timelines
        self._model = model
        self._offset = time.time() - clock()  # from the clock to seconds since 1970

    def on_finished(
        self, state: SampleState, num_output_tokens: int, reason: FinishReason, now: float
    ) -> None:
        """A request has ended, at `now`."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        request, origin = state.request, state.samples.origin
        timeline = self._timelines.take(request.request_id)
        root = self._tracer.start_span(
            f"{origin.operation} {origin.model or self._model}",
            context=self._propagator.extract(origin.trace_headers),
            kind=SpanKind.SERVER,
            start_time=self._ns(request.arrival_time),
        )
        if root.is_recording():
            root.set_attributes(self._describe(state, num_output_tokens, reason))
            if reason is FinishReason.ERROR:
                from opentelemetry.trace import StatusCode

                root.set_attribute("error.type", "request_failed")
                root.set_status(StatusCode.ERROR)
            self._add_phases(set_span_in_context(root), state, timeline, now)
        root.end(self._ns(now))

    def _describe(
        self, state: SampleState, num_output_tokens: int, reason: FinishReason
    ) -> Mapping[str, Any]:
        request, origin, params = state.request, state.samples.origin, state.request.sampling_params
        described: dict[str, Any] = {
            "gen_ai.operation.name": origin.operation,
            "gen_ai.provider.name": "aioserve",
            "gen_ai.request.model": origin.model or self._model,
            "gen_ai.response.model": origin.model or self._model,
            "gen_ai.response.id": state.samples.request_id,
            "gen_ai.response.finish_reasons": [reason.value],
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
            "gen_ai.usage.output_tokens": num_output_tokens,
            "aioserve.request.priority": request.priority,
            "aioserve.request.num_preemptions": request.num_preemptions,
        }
        if request.pooling_params is None:
            described |= {
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.frequency_penalty": params.frequency_penalty,
                "gen_ai.request.presence_penalty": params.presence_penalty,
            }
            if params.max_tokens is not None:
                described["gen_ai.request.max_tokens"] = params.max_tokens
            if params.seed is not None:
                described["gen_ai.request.seed"] = params.seed
        if (count := len(state.samples.ids)) > 1:
            described["gen_ai.request.choice.count"] = count
        if (first := state.first_token_time) is not None:
            described["gen_ai.response.time_to_first_chunk"] = first - request.arrival_time
        return described

    def _add_phases(
        self, context: Any, state: SampleState, timeline: Timeline | None, now: float
    ) -> None:
        """Add its phases as children; a phase that the request did not reach has none."""

        def span(name: str, begin: float, end: float) -> "Span":
            child = self._tracer.start_span(name, context=context, start_time=self._ns(begin))
            child.end(self._ns(max(begin, end)))
            return child

        served, first = state.scheduled_time, state.first_token_time
        span("queued", state.request.arrival_time, now if served is None else served)
        if served is None:
            return
        if timeline is not None:
            self._add_prefill(context, timeline, served, now if first is None else first)
            ends = [*timeline.resumed, now]
            for (name, begin), end in zip(timeline.left, ends, strict=False):
                span(name, begin, end)
        if first is not None and state.request.pooling_params is None:
            span("decode", first, now)

    def _add_prefill(self, context: Any, timeline: Timeline, begin: float, end: float) -> None:
        child = self._tracer.start_span("prefill", context=context, start_time=self._ns(begin))
        for chunk in timeline.chunks:
            child.add_event(
                "chunk",
                {
                    "aioserve.step": chunk.step_id,
                    "aioserve.chunk.tokens": chunk.num_tokens,
                    "aioserve.chunk.computed_before": chunk.num_computed,
                },
                self._ns(chunk.time),
            )
        child.end(self._ns(max(begin, end)))

    def _ns(self, seconds: float) -> int:
        return int((seconds + self._offset) * 1e9)

    async def close(self) -> None:
        """Send what was not sent yet, for `CLOSE_SECONDS` at most: a collector may stand still."""
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[None] = loop.create_future()

        def end() -> None:
            if not sent.done():
                sent.set_result(None)

        def shut_down() -> None:
            try:
                self._provider.shutdown()
            finally:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(end)

        # A daemon, and none of the loop's: those are waited for at its end.
        threading.Thread(target=shut_down, name="aioserve-traces", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await sent
        except TimeoutError:
            logger.warning(
                "the last traces are not sent: the collector has not taken them within %g s",
                CLOSE_SECONDS,
            )
