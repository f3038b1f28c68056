"""What is written of each request: the request log, lines of the process's log, and traces.

Each is written only where it is asked for. Knows nothing of text, but that of a prompt which it is
given.
"""

import asyncio
import importlib.util
import logging
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from aioserve.engine.prompt import Conversation, Encoded
from aioserve.engine.stream import SampleState
from aioserve.errors import ConfigError
from aioserve.multimodal import MultimodalPrompt
from aioserve.outputs import FinishReason
from aioserve.params import SamplingParams
from aioserve.request import Request, RequestStatus
from aioserve.scheduler import SchedulerOutput
from aioserve.step_loop import StepObserver
from aioserve.support.files import begin_log
from aioserve.support.logs import BackgroundWriter, Gaps
from aioserve.support.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span


# One JSON line per request that has ended: when it came, how long it was, whose it was. What
# `compare --workload FILE.jsonl` reads. No text and no tokens; those, and every decision, are in
# the decision log.


Count = Annotated[int, Meta(ge=1)]
_SERVED = RequestStatus.FINISHED_STOPPED


class RequestLogLine(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A line: `{"arrival": 1.5, "prompt_tokens": 374, "output_tokens": 44}`."""

    arrival: Annotated[float, Meta(ge=0)]  # seconds since the log began
    prompt_tokens: Count
    output_tokens: Annotated[int, Meta(ge=0)]  # 0: an embedding
    priority: int = 0
    user: str = ""
    timeout: Annotated[float, Meta(gt=0)] | None = None  # seconds


class _LostLines(Gaps):
    """Says in the server's log that lines are missing."""

    def __init__(self, path: str) -> None:
        self._path = path

    def begins(self, error: OSError) -> None:
        logger.error("request log %s loses lines: %s", self._path, error.strerror or error)

    def ends(self, num_lines: int, error: OSError) -> bytes:
        logger.warning("request log %s goes on; %d lines are lost", self._path, num_lines)
        return b""


class RequestLog:
    """Begins a new file; an older one of that name is kept beside it. A thread writes it: a disk or
    a reader that stands still holds up no request, and lines that find no room are counted.
    """

    def __init__(self, path: str, now: float) -> None:
        """`now` is the engine's clock, in seconds. Raises `ConfigError`."""
        self._path = path
        open_file = begin_log(path, "request log", 0o644)
        self._writer = BackgroundWriter(open_file, "requests", _LostLines(path))
        weakref.finalize(self, self._writer.close, 0.0)  # its thread ends with it in any case
        self._began = now
        self._encoder = msgspec.json.Encoder()

    def write(self, request: Request, num_output_tokens: int) -> None:
        """Note a request that has ended. One that got no token and no vector is left out."""
        is_pooled = request.pooling_params is not None
        if num_output_tokens == 0 and not (is_pooled and request.status is _SERVED):
            return
        timeout = None if request.deadline is None else request.deadline - request.arrival_time
        line = RequestLogLine(
            round(max(request.arrival_time - self._began, 0.0), 6),
            request.num_prompt_tokens,
            num_output_tokens,
            request.priority,
            request.user,
            timeout,
        )
        self._writer.write(self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        """Idempotent; nothing can be written afterwards. Waits a moment for what reads the file."""
        if not self._writer.close():
            logger.error("request log %s lacks its end: its reader stands still", self._path)


# One line in the log per request that has ended, and, if asked for, one with its prompt. The fields
# stand in a fixed order. Knows nothing of text, but that of a prompt which it is given.


logger = logging.getLogger(__name__)

MAX_PROMPT_CHARACTERS = 10_000  # of a prompt in the log


class RequestLine(msgspec.Struct, frozen=True):
    """What the log says of a request; `--log-format json` has these as fields."""

    request_id: str
    client: str  # its address; "-": none is known
    key: str  # the name of the key that it came with; "-": none was asked for
    model: str  # or adapter
    prompt_tokens: int
    cached_tokens: int  # of these
    output_tokens: int
    ttft: float | None  # seconds to the first token; None: there was none
    seconds: float  # to the end
    finish: str  # reason

    def __str__(self) -> str:
        ttft = "-" if self.ttft is None else f"{self.ttft:.3f}"
        return (
            f"{self.request_id} client={self.client} key={self.key} model={self.model} "
            f"prompt={self.prompt_tokens} cached={self.cached_tokens} output={self.output_tokens} "
            f"ttft={ttft} seconds={self.seconds:.3f} finish={self.finish}"
        )


def log_request(
    state: SampleState, num_output_tokens: int, reason: FinishReason, now: float
) -> None:
    """It has ended, at `now` in seconds of the engine's clock."""
    if not logger.isEnabledFor(logging.INFO):
        return
    request, origin, first = state.request, state.samples.origin, state.first_token_time
    line = RequestLine(
        request.request_id,
        origin.client or "-",
        request.spec.key_name or "-",
        origin.model or "-",
        request.num_prompt_tokens,
        request.num_cached_tokens,
        num_output_tokens,
        None if first is None else round(first - request.arrival_time, 6),
        round(now - request.arrival_time, 6),
        reason.value,
    )
    logger.info("%s", line, extra={"fields": msgspec.structs.asdict(line)})


def log_prompt(request_id: str, prompt: Any, params: SamplingParams) -> None:
    """Log a prompt word for word: only with --log-prompts."""
    text = msgspec.json.encode(prompt, enc_hook=repr).decode()
    if len(text) > MAX_PROMPT_CHARACTERS:
        text = f"{text[:MAX_PROMPT_CHARACTERS]}... ({len(text)} characters)"
    fields = {"request_id": request_id, "prompt": text, "max_tokens": params.max_tokens}
    logger.info(
        "%s prompt=%s max_tokens=%s", request_id, text, params.max_tokens, extra={"fields": fields}
    )


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
    """What happened to one request, step by step, for its trace."""

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
        self._prefilling: dict[str, Timeline] = {}  # of these, those whose prompt is not computed

    def take(self, request_id: str) -> Timeline | None:
        """The notes on a request that has ended; None if it was never accepted."""
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


# A trace of each request for OpenTelemetry: queued, prefilled, decoded, preempted, paused. Spans
# are made when the request has ended, of times that the engine knows anyway. Names are those of the
# semantic conventions for generative AI where these have one. Knows no HTTP; the SDK is imported
# only where traces are wanted.


INSTALL_LINE = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"

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
    """What sends spans to a collector, by OTLP over HTTP, from a thread of its own."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)


def operation_of(prompt: Any, *, is_pooled: bool) -> str:
    """What the conventions call a request of this prompt."""
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
        """What it went through, as children; a phase that it did not reach has none."""

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
        """Send what was not sent yet; gives up after the exporter's timeout."""
        await asyncio.to_thread(self._provider.shutdown)
