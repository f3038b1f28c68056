"""Traces over HTTP on both sides: a client's header comes in, OTLP goes out to a collector."""

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


async def test_a_collector_gets_the_spans_of_a_server(start_server):
    got = ExportTraceServiceRequest()

    async def take(request):
        assert request.content_type == "application/x-protobuf"
        got.MergeFromString(await request.read())
        body = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=body, content_type="application/x-protobuf")

    collector = web.Application()
    collector.router.add_post("/v1/traces", take)
    runner = web.AppRunner(collector)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    try:
        endpoint = f"http://{host}:{port}/v1/traces"
        async with start_server(server={"otlp_traces_endpoint": endpoint}) as server:
            body = {"prompt": "Hello", "max_tokens": 2, "ignore_eos": True}
            headers = {"traceparent": TRACEPARENT}
            answer = await server.request("POST", "/v1/completions", json=body, headers=headers)
            assert answer.status == 200
    finally:
        await runner.cleanup()
    [resource] = got.resource_spans
    names = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert names["service.name"] == "aioserve"
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    root = spans["text_completion embedded"]
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert spans.keys() == {"text_completion embedded", "queued", "prefill", "decode"}
