"""What it costs to be observed: scrapes, and traces, beside nobody who looks, in turns.

    python benchmarks/observed.py [--streams 256] [--step-ms 20] [--seconds 4] [--rounds 5]

Streams in a closed loop on the simulated runner, in one process, whose CPU time per token is
measured: with nobody who looks; with a scrape of all metrics each second; with a trace of every
request, whose spans are made and then dropped. Printed as ratios to the turn before, of nobody; and
what one scrape takes. Counting goes on in all of them. The last line is JSON.
"""

import argparse
import asyncio
import json
import statistics
import time

from aioserve import AsyncEngine, EngineConfig, SamplingParams

PROMPT_TOKENS, OUTPUT_TOKENS = 50, 100
KINDS = ("nobody", "scrapes", "traces")


async def client(engine: AsyncEngine, number: int) -> None:
    """Asks again as soon as it is answered."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    while True:
        async for _ in engine.generate([number % 90 + 5] * PROMPT_TOKENS, params):
            pass


async def scrape(engine: AsyncEngine, times: list[float]) -> None:
    """Each second, as Prometheus does."""
    while True:
        began = time.perf_counter()
        engine.metrics.render()
        times.append(time.perf_counter() - began)
        await asyncio.sleep(1)


async def run(kind: str, args: argparse.Namespace, times: list[float]) -> float:
    """Microseconds of CPU per token."""
    settings = [
        ("runner.runner", "simulated"),
        ("runner.step_base_ms", args.step_ms),
        ("scheduler.max_num_seqs", args.streams),
    ]
    if kind == "traces":
        settings.append(("server.otlp_traces_endpoint", "http://127.0.0.1:1/v1/traces"))
    async with AsyncEngine(EngineConfig.load(None, settings)) as engine:
        tasks = [asyncio.create_task(client(engine, i)) for i in range(args.streams)]
        if kind == "scrapes":
            tasks.append(asyncio.create_task(scrape(engine, times)))
        await asyncio.sleep(1)
        before, tokens = time.process_time(), engine.metrics.num_generation_tokens
        await asyncio.sleep(args.seconds)
        spent = time.process_time() - before
        made = engine.metrics.num_generation_tokens - tokens
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return 1e6 * spent / made


def drop_spans() -> None:
    """Nobody collects them: what is measured is how they are made and handed on."""
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from aioserve.engine import builder

    vars(builder)["make_exporter"] = lambda endpoint: InMemorySpanExporter()


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs to be observed.")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    drop_spans()
    times: list[float] = []
    ratios: dict[str, list[float]] = {kind: [] for kind in KINDS[1:]}
    per_token: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(args.rounds):
        for kind in KINDS[1:]:
            for one in ("nobody", kind):
                per_token[one].append(asyncio.run(run(one, args, times)))
            ratios[kind].append(per_token[kind][-1] / per_token["nobody"][-1])
            print(
                f"{kind:8} {per_token[kind][-1]:6.2f} us/token, nobody "
                f"{per_token['nobody'][-1]:6.2f}: {ratios[kind][-1]:.3f}",
                flush=True,
            )
    medians = {kind: statistics.median(found) for kind, found in ratios.items()}
    scrape_ms = 1e3 * statistics.median(times)
    for kind, ratio in medians.items():
        print(f"{kind}: {ratio:.3f} times the CPU per token")
    print(f"a scrape: {scrape_ms:.2f} ms")
    print(json.dumps({"streams": args.streams, "ratios": medians, "scrape_ms": scrape_ms}))


if __name__ == "__main__":
    main()
