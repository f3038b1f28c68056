"""What a scrape tells: states, times of a request's phases, how HTTP was answered, vLLM's names."""

import asyncio
import logging
import os
import re
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import aioserve
from aioserve.engine import AsyncEngine
from aioserve.engine import watchdog as pulses
from aioserve.engine.exposition import VLLM_NAMES
from aioserve.engine.metrics import Histogram, RecentWorst
from aioserve.params import SamplingParams
from tests.processes import PATIENCE
from tests.server.raw_client import RawClient
from tests.server.serving import SIMULATED

ROOT = Path(__file__).parents[2]
PHASES = ("queue", "prefill", "decode", "inference")


async def scrape(server):
    """Values by name and labels, but for the process."""
    text = (await server.get("/metrics")).body.decode()
    return {
        (sample.name, frozenset(kv for kv in sample.labels.items() if kv[0] != "process")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(values, name, **labels):
    return values[name, frozenset(labels.items())]


async def test_the_phases_of_a_request_are_its_latency(server):
    for token in (5, 6, 7):
        await server.complete([token] * 200, max_tokens=20, ignore_eos=True)
    values = await scrape(server)
    names = {phase: f"aioserve_request_{phase}_time_seconds" for phase in PHASES}
    assert {value(values, f"{name}_count") for name in names.values()} == {3}
    sums = {phase: value(values, f"{name}_sum") for phase, name in names.items()}
    whole = value(values, "aioserve_request_latency_seconds_sum")
    assert sums["queue"] + sums["inference"] == pytest.approx(whole)
    assert sums["prefill"] + sums["decode"] == pytest.approx(sums["inference"])
    # Steps take at least a millisecond: 200 tokens in chunks of 64, and 19 more.
    assert sums["prefill"] >= 3 * 4e-3
    assert sums["decode"] >= 3 * 19e-3
    first = value(values, "aioserve_time_to_first_token_seconds_sum")
    assert sums["queue"] + sums["prefill"] == pytest.approx(first)
    assert value(values, "aioserve_request_prompt_tokens_sum") == 600
    assert value(values, "aioserve_request_generation_tokens_sum") == 60


async def test_one_that_was_never_served_has_only_waited(start_server):
    async with start_server(
        runner={"step_base_ms": 20}, scheduler={"max_num_seqs": 1, "queue_timeout": 0.05}
    ) as server:
        first = await RawClient.post(
            server, prompt="Hello", stream=True, max_tokens=3000, ignore_eos=True
        )
        await first.read_events(1)
        second = await server.complete(max_tokens=5)
        assert second.json()["choices"][0]["finish_reason"] == "timeout"
        values = await scrape(server)
        assert value(values, "aioserve_request_queue_time_seconds_count") == 1
        assert value(values, "aioserve_request_queue_time_seconds_sum") >= 0.05
        assert value(values, "aioserve_request_inference_time_seconds_count") == 0
        await first.leave()


async def test_answers_are_counted_by_route_and_status(server):
    await server.complete(max_tokens=1)
    await server.complete(max_tokens=-1)
    await server.session.get(server.url + "/v1/models/none/of/ours")
    await server.session.get(server.url + "/what/a/client/made/up")
    await server.session.request("PROPFIND", server.url + "/coffee")
    values = await scrape(server)
    for method, route, status in (
        ("POST", "/v1/completions", "200"),
        ("POST", "/v1/completions", "400"),
        ("GET", "/v1/models/{id}", "404"),
        ("GET", "other", "404"),
        ("other", "other", "404"),
    ):
        labels = {"method": method, "route": route, "status": status}
        assert value(values, "aioserve_http_requests_total", **labels) == 1


async def test_a_client_that_leaves_is_counted(server):
    body = {"prompt": "Hello", "stream": True, "max_tokens": 3000, "ignore_eos": True}
    response = await server.session.post(server.url + "/v1/completions", json=body)
    await response.content.readline()
    response.close()
    key = (
        "aioserve_http_requests_total",
        frozenset({("method", "POST"), ("route", "/v1/completions"), ("status", "499")}),
    )
    async with asyncio.timeout(PATIENCE):
        while (await scrape(server)).get(key) != 1:
            pass


async def test_the_policy_and_all_its_options_are_labels(start_server):
    shadow = {"shadow_policy": "fcfs"}
    async with start_server(server={"enable_admin": True}, shadow=shadow) as server:
        values = await scrape(server)
        assert value(values, "aioserve_policy_info", policy="chunked_prefill", chunk_size="64") == 1
        assert value(values, "aioserve_shadow_policy_info", policy="fcfs") == 1
        model = {"model": "embedded", "max_model_len": str(server.engine.max_model_len)}
        model["activations"] = "exact"
        version = aioserve.__version__
        assert value(values, "aioserve_model_info", **model, block_size="16", version=version) == 1
        body = {"policy": "mlfq"}
        assert (await server.request("POST", "/admin/policy", json=body)).status == 200
        [labels] = [dict(k[1]) for k in await scrape(server) if k[0] == "aioserve_policy_info"]
        assert labels.pop("policy") == "mlfq"
        assert labels  # its defaults


async def test_the_process_is_measured(server):
    values = await scrape(server)
    assert value(values, "process_resident_memory_bytes") > 2**20
    assert value(values, "process_open_fds") > 3


async def test_vllms_names_say_what_ours_say(server):
    await server.complete([5] * 200, max_tokens=20, ignore_eos=True)
    values = await scrape(server)
    for ours, theirs in VLLM_NAMES.items():
        own = {
            (name.removeprefix(f"aioserve_{ours}"), labels): count
            for (name, labels), count in values.items()
            if name.removeprefix(f"aioserve_{ours}")
            in ("", "_total", "_bucket", "_sum", "_count", "_created")
        }
        assert own, ours
        for their_name in theirs:
            for (suffix, labels), count in own.items():
                renamed = {"finished_reason" if k == "reason" else k: v for k, v in labels}
                renamed |= {"model_name": "embedded", "engine": "0"}
                assert value(values, f"vllm:{their_name}{suffix}", **renamed) == count


async def test_the_delays_of_the_loop_are_counted_while_there_is_work(server, monkeypatch):
    monkeypatch.setattr(pulses, "BEAT_SECONDS", 0.001)
    name = "aioserve_event_loop_delay_seconds_count"
    assert value(await scrape(server), name) == 0
    await server.complete(max_tokens=50, ignore_eos=True)
    async with asyncio.timeout(PATIENCE):
        while (await scrape(server))[name, frozenset()] == 0:
            await server.complete(max_tokens=50, ignore_eos=True)
    pulse = server.engine.internals.loop_monitor
    async with asyncio.timeout(PATIENCE):
        while pulse._timer is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_the_worst_delay_of_late_is_told_to_every_scraper_alike(server):
    server.engine.internals.loop_monitor.worst.observe(0.75)
    name = "aioserve_event_loop_lag_seconds"
    assert [value(await scrape(server), name) for _ in range(3)] == [0.75] * 3


def test_the_worst_of_late_is_forgotten_after_its_time():
    now = 1000.0
    worst = RecentWorst(lambda: now)
    assert worst() == 0.0
    for second, delay in ((1000.0, 0.2), (1005.0, 0.5), (1030.0, 0.1), (1031.0, 0.3)):
        now = second
        worst.observe(delay)
    found = []
    for second in (1031.0, 1055.0, 1080.0, 1085.0, 1110.0):
        now = second
        found.append(worst())
    assert found == [0.5, 0.5, 0.3, 0.3, 0.0]


async def test_while_it_is_busy_the_log_says_how_it_stands(monkeypatch, caplog):
    monkeypatch.setattr(pulses, "BEAT_SECONDS", 0.001)
    monkeypatch.setattr(pulses, "STATE_SECONDS", 0.002)
    caplog.set_level(logging.INFO)
    async with AsyncEngine(SIMULATED) as engine:
        assert not [r for r in caplog.records if r.name == "aioserve.engine.watchdog"]
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        async for _ in engine.generate([5] * 100, params):
            if [r for r in caplog.records if "1 running, 0 waiting" in r.getMessage()]:
                break
        else:
            pytest.fail("nothing was said")


@pytest.mark.skipif(not os.environ.get("AIOSERVE_TEST_WORKER"), reason="of workers")
async def test_every_process_tells_its_own(server):
    await server.complete(max_tokens=1)
    text = (await server.get("/metrics")).body.decode()
    assert 'aioserve_event_loop_delay_seconds_count{process="worker-0"}' in text
    assert 'process="worker-0",route="/v1/completions",status="200"} 1.0' in text


def test_histograms_cross_between_processes_as_they_are():
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.5, 3)
    encoded = msgspec.msgpack.encode(histogram)
    assert msgspec.msgpack.decode(encoded, type=Histogram).cumulative() == histogram.cumulative()
    assert Histogram((1.0, 2.0)).counts == [0, 0, 0]  # not shared


async def test_the_page_names_what_a_scrape_has(start_server, tmp_path):
    page = (ROOT / "docs/metrics.md").read_text()
    table = re.findall(r"^\| `vllm:(\w+)` \| `aioserve_(\w+)` \|", page, re.MULTILINE)
    assert table == [(name, ours) for ours, theirs in VLLM_NAMES.items() for name in theirs]
    scheduler = {"policy": "fair"}  # which shows gauges of its own
    settings = {"shadow": {"shadow_policy": "fcfs"}, "batches": {"batch_dir": str(tmp_path)}}
    async with start_server(scheduler=scheduler, **settings) as server:
        await server.complete(max_tokens=3)
        text = (await server.get("/metrics")).body.decode()
        families = {family.name for family in text_string_to_metric_families(text)}
        ours = page[: page.index("## vLLM's names")]
        named = set(re.findall(r"`((?:aioserve|process)_\w+?)(?:_total)?`", ours))
        assert named - {"aioserve_compute_threads"} <= families
