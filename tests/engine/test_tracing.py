"""Traces of requests, made by OpenTelemetry's own SDK: what each went through, and whose it is."""

import asyncio
import importlib.util
import socket
import threading
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from aioserve import AsyncEngine, EngineConfig, PoolingParams, SamplingParams
from aioserve.config import CacheConfig, RunnerConfig, SchedulerConfig, ServerConfig
from aioserve.engine.tracing import Timelines, Tracing
from aioserve.errors import ConfigError
from tests.engine.pausing_policy import PausesAtEveryTurn
from tests.kit import stats_of
from tests.processes import PATIENCE
from tests.server.serving import SIMULATED

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.5, seed=3)
ENDPOINT = "http://127.0.0.1:1/v1/traces"  # nobody is there; spans go elsewhere


def traced(endpoint: str = ENDPOINT, **cache: Any) -> EngineConfig:
    return EngineConfig(
        runner=RunnerConfig(runner="simulated", step_base_ms=1),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(policy="chunked_prefill", options={"chunk_size": 64}),
        server=ServerConfig(otlp_traces_endpoint=endpoint),
    )


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Where the engine's spans go; all are there once it has been shut down."""
    memory = InMemorySpanExporter()
    monkeypatch.setattr("aioserve.engine.tracing.make_exporter", lambda endpoint: memory)
    return memory


def by_name(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_request_is_queued_prefilled_in_chunks_and_decoded(
    exporter: InMemorySpanExporter,
) -> None:
    async with AsyncEngine(traced()) as engine:
        headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1"}
        outputs = engine.generate([5] * 200, PARAMS, request_id="one", trace_headers=headers)
        async for _ in outputs:
            pass
    spans = by_name(exporter)
    [root] = spans.pop("text_completion embedded")
    assert f"{root.context.trace_id:032x}" == TRACE_ID
    assert root.parent is not None
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert root.context.trace_state.get("vendor") == "1"
    own = attributes(root)
    assert own.pop("gen_ai.response.time_to_first_chunk") > 0
    assert own == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "aioserve",
        "gen_ai.request.model": "embedded",
        "gen_ai.response.model": "embedded",
        "gen_ai.response.id": "one",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.max_tokens": 20,
        "gen_ai.request.seed": 3,
        "aioserve.request.priority": 0,
        "aioserve.request.num_preemptions": 0,
    }
    assert list(spans) == ["queued", "prefill", "decode"]
    [queued], [prefill], [decode] = spans.values()
    for child in (queued, prefill, decode):
        assert child.parent is not None
        assert child.parent.span_id == root.context.span_id
    assert queued.start_time == root.start_time
    assert queued.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time
    assert decode.end_time == root.end_time
    chunks = [attributes_of_event(event) for event in prefill.events]
    assert [chunk["aioserve.chunk.tokens"] for chunk in chunks] == [64, 64, 64, 8]
    assert [chunk["aioserve.chunk.computed_before"] for chunk in chunks] == [0, 64, 128, 192]
    times = [event.timestamp for event in prefill.events]
    assert times == sorted(times)


def attributes_of_event(event: Any) -> dict[str, Any]:
    assert event.name == "chunk"
    return dict(event.attributes)


async def test_a_pause_is_a_span_of_its_own(exporter: InMemorySpanExporter) -> None:
    policy = f"{PausesAtEveryTurn.__module__}:{PausesAtEveryTurn.__name__}"
    async with AsyncEngine(traced()) as engine:
        engine.switch_policy(policy)
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        async for _ in engine.generate([5] * 40, params):
            pass
    spans = by_name(exporter)
    assert len(spans["paused"]) > 2
    assert "preempted" not in spans


async def test_who_lost_its_blocks_says_when(exporter: InMemorySpanExporter) -> None:
    async with AsyncEngine(traced(num_kv_blocks=12, watermark=0.0)) as engine:

        async def read(token: int) -> None:
            params = SamplingParams(max_tokens=80, ignore_eos=True)
            async for _ in engine.generate([token] * 40, params):
                pass

        await asyncio.gather(*(read(token) for token in (5, 6, 7)))
        stats = stats_of(engine)
    spans = by_name(exporter)
    roots = spans["text_completion embedded"]
    assert stats.num_preemptions > 0
    told = sum(attributes(root)["aioserve.request.num_preemptions"] for root in roots)
    assert len(spans["preempted"]) == told == stats.num_preemptions
    ends = {root.context.span_id: root.end_time for root in roots}
    for span in spans["preempted"]:
        assert span.parent is not None
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time < span.end_time < (ends[span.parent.span_id] or 0)


async def test_one_that_never_ran_was_queued_and_no_more(exporter: InMemorySpanExporter) -> None:
    async with AsyncEngine(traced()) as engine:
        await engine.pause()
        stream = await engine.add_request([5], PARAMS, timeout=0.01)
        async for _ in stream:
            pass
    spans = by_name(exporter)
    assert list(spans) == ["queued", "text_completion embedded"]
    [root] = spans["text_completion embedded"]
    assert attributes(root)["gen_ai.response.finish_reasons"] == ("timeout",)


async def test_requests_are_called_what_they_are(exporter: InMemorySpanExporter) -> None:
    async with AsyncEngine(traced()) as engine:
        for prompt in ("Hello", [5], [{"role": "user", "content": "Hello"}]):
            async for _ in engine.generate(prompt, SamplingParams(max_tokens=1)):
                pass
        await engine.embed("Hello", PoolingParams())
        async for _ in engine.generate("Hello", SamplingParams(max_tokens=1, n=2)):
            pass
    spans = by_name(exporter)
    assert len(spans["text_completion embedded"]) == 4
    assert len(spans["chat embedded"]) == 1
    [embedding] = spans["embeddings embedded"]
    assert attributes(embedding)["gen_ai.usage.output_tokens"] == 0
    assert "decode" not in {
        child.name
        for name in ("queued", "prefill", "decode")
        for child in spans[name]
        if child.parent is not None and child.parent.span_id == embedding.context.span_id
    }
    counts = [
        attributes(s).get("gen_ai.request.choice.count") for s in spans["text_completion embedded"]
    ]
    assert sorted(count for count in counts if count) == [2, 2]


async def test_a_client_that_is_not_sampled_gets_no_spans(exporter: InMemorySpanExporter) -> None:
    async with AsyncEngine(traced()) as engine:
        headers = {"traceparent": TRACEPARENT[:-1] + "0"}
        async for _ in engine.generate("Hello", PARAMS, trace_headers=headers):
            pass
    assert not exporter.get_finished_spans()


async def test_a_collector_that_never_answers_holds_up_neither_requests_nor_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("aioserve.engine.tracing.CLOSE_SECONDS", 0.2, raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")  # seconds of its thread
    others = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as collector:  # the system takes connections
        endpoint = f"http://127.0.0.1:{collector.getsockname()[1]}/v1/traces"
        async with AsyncEngine(traced(endpoint)) as engine:
            for _ in range(3):
                outputs = [output async for output in engine.generate([5] * 20, PARAMS)]
                assert outputs[-1].finish_reason == "length"
    assert "the last traces are not sent" in caplog.text
    for thread in set(threading.enumerate()) - others:  # without a collector they give up
        await asyncio.to_thread(thread.join, PATIENCE)


async def test_notes_go_when_their_requests_end(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Timelines] = []
    begin = Timelines.__init__

    def noting(timelines: Timelines, *args: Any) -> None:
        begin(timelines, *args)
        made.append(timelines)

    monkeypatch.setattr(Timelines, "__init__", noting)
    async with AsyncEngine(traced()) as engine:
        [timelines] = made
        stream = await engine.add_request([5] * 200, PARAMS)
        other = await engine.add_request([6] * 200, PARAMS)
        assert len(timelines._timelines) == 2
        stream.close()
        async for _ in other:
            pass
        assert not timelines._timelines
        assert not timelines._prefilling


async def test_without_an_endpoint_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracing, "__init__", None)  # it would raise
    async with AsyncEngine(SIMULATED) as engine:
        snapshot = engine.inspect()
        assert snapshot is not None
        assert snapshot.watchers == []


async def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_other(name: str, package: str | None = None) -> Any:
        return None if name.startswith("opentelemetry.exporter") else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_other)
    with pytest.raises(ConfigError, match=r"pip install opentelemetry-sdk"):
        await AsyncEngine(traced()).start()
