"""What lies between a token and a socket: CPU time of whole servers, and of API workers.

    python benchmarks/front.py servers            # 256 and 1,000 streams, beside vLLM
    python benchmarks/front.py workers            # --api-workers 0, 1, 2, 4

`servers`: microseconds of CPU time per streamed token of a whole server, all its processes
together, beside vLLM's. All serve the embedded model, of which a step takes so little that the
front end counts, and stream to many clients at once, each on a connection of its own. *front* is
the part of aioserve's event loop, which schedules as well, and its workers; of vLLM it is all
processes but the engine core, which schedules. *request* is what the front end takes once for each
request, in microseconds: connection, prompt, first token and end, by a turn of short answers, which
is not in the other numbers. `--rust` is the program of vLLM's front end in Rust, which its wheel
for CPUs lacks. Servers take turns, one at a time; medians, and ratios to the first server.

`workers`: the hop by itself, outputs of a step encoded, sent, received and decoded, in one process,
the least CPU of several runs. Then the same streams from the simulated runner by the number of API
workers: CPU per token of the engine's process and of the workers, and how late each event loop is
at worst. The client shares the machine: with few cores, what it and the workers take is missing
elsewhere, and only the CPU times say what more cores would gain. The last line is JSON.
"""

import asyncio
import re
import statistics
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from typing import Any

import zmq
from build_peers import vllm
from harness import (
    Args,
    Opt,
    Program,
    Server,
    Table,
    cpu_seconds,
    main_thread_seconds,
    medians,
    process_title,
    raise_descriptors,
    ratio,
    send_streams,
    serving,
    tree,
    turns,
)

from aioserve.config import ModelConfig
from aioserve.fleet.workers.messages import Line, ToWorker, decoder, encoder
from aioserve.model_source.info import find_model
from aioserve.outputs import EngineCoreOutput

program = Program(__doc__)

SHORT = 4  # tokens of the answers that stand for what comes once
POLL_SECONDS = 0.25  # between looks at the lag of the loops
US_A_TOKEN = "us a token"


# Whole servers.


def known_servers(streams: int, args: Args) -> dict[str, dict[str, Any]]:
    """How each server is started."""
    seats = ["--max-num-seqs", str(streams)]
    found: dict[str, dict[str, Any]] = {}
    for workers in args.workers:
        name = f"aioserve, {workers} workers" if workers else "aioserve"
        words = [sys.executable, "-m", "aioserve", "--port", "{port}", "--log-level", "warning"]
        words += ["--speculative-method", "none"]  # tokens one by one, as vLLM's
        words += ["--api-workers", str(workers), *args.serve.split()]
        found[name] = {"program": [*words, *seats]}
    peer = vllm()
    if peer.missing:
        print(f"vLLM is left out: {peer.missing}", file=sys.stderr)
        return found
    model = str(find_model(ModelConfig()).path)
    words = [peer.words[0], "serve", model, "--port", "{port}", "--dtype", "bfloat16", *seats]
    words += ["--max-model-len", "1024", "--max-num-batched-tokens", "2048"]
    options = {**peer.options, "program": words, "patience": 1800.0}
    options["env"]["VLLM_CPU_KVCACHE_SPACE"] = "1"
    found["vLLM, Python"] = options
    if args.rust:
        rust = {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": args.rust}
        found["vLLM, Rust"] = {**options, "env": {**options["env"], **rust}}
    return found


def front_seconds(pid: int) -> tuple[float, float]:
    """Processor time so far: of all processes of a server, and of its front end."""
    spent = {each: cpu_seconds(each) for each in tree(pid)}
    cores = [each for each in spent if "EngineCore" in process_title(each)]
    if cores:
        engine = {each for core in cores for each in tree(core)}
        return sum(spent.values()), sum(spent[each] for each in spent.keys() - engine)
    others = sum(spent.values()) - spent[pid]  # workers in front of the engine
    return sum(spent.values()), main_thread_seconds(pid) + others


def measure_server(server: Server, streams: int, tokens: int) -> dict[str, float]:
    """Microseconds of CPU time: of a token, of its front end, and of a request."""

    def spend(count: int) -> list[float]:
        before = *front_seconds(server.pid), time.perf_counter()
        asyncio.run(send_streams(server.url, streams, count))
        now = *front_seconds(server.pid), time.perf_counter()
        return [b - a for a, b in zip(before, now, strict=True)]

    short, long = spend(SHORT), spend(SHORT + tokens)
    whole, front, seconds = (b - a for a, b in zip(short, long, strict=True))
    us = 1e6 / (streams * tokens)
    return {
        US_A_TOKEN: us * whole,
        "front": us * front,
        "request": 1e6 * (short[1] - SHORT * front / tokens) / streams,
        "tokens/s": streams * tokens / seconds,
    }


@program.command(
    "servers",
    streams=[256, 1000],
    tokens=Opt(300, "of each stream"),
    workers=Opt([0], "API workers in front of the engine, for a row each"),
    serve=Opt("", "more words for aioserve's command line"),
    rust=Opt("", "vLLM's front end in Rust, a program"),
    rounds=3,
)
def servers(args: Args) -> dict[str, Any]:
    """CPU time of a token in a whole server, at many streams."""
    raise_descriptors(2 * max(args.streams) + 256)
    numbers = dict.fromkeys((US_A_TOKEN, "front", "request"), ">12.1f")
    rates = {"tokens/s": ">10,.0f", "ratio": ">8.2f"}
    table = Table({"streams": "<9d", "server": "<22", **numbers, **rates})
    for streams in args.streams:
        rows: dict[str, list[dict[str, float]]] = defaultdict(list)
        known = known_servers(streams, args)
        for _, name in turns(list(known), args.rounds):
            with serving(**known[name]) as server:
                asyncio.run(send_streams(server.url, streams, SHORT))
                rows[name].append(measure_server(server, streams, args.tokens))
        costs = {name: [row[US_A_TOKEN] for row in found] for name, found in rows.items()}
        first = next(iter(costs.values()))
        for name, found in rows.items():
            told = {**medians(found), "ratio": ratio(costs[name], first)}
            table.add({"streams": streams, "server": name, **told})
    return {"rows": table.rows}


# API workers.


async def hop(batch: int, num_steps: int = 400, repeat: int = 7) -> float:
    """CPU of one token of a step of `batch` tokens, in microseconds, with all threads of ZeroMQ."""
    outputs = [EngineCoreOutput(f"cmpl-{uuid.uuid4().hex}", [1000 + i]) for i in range(batch)]
    decode = decoder(ToWorker).decode
    received = 0
    step = asyncio.Event()

    def take(message: bytes, _: object) -> None:
        nonlocal received
        received += len(decode(message).outputs)
        step.set()

    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    best = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        ends = [
            Line(context, f"ipc://{folder}/x", listens=it, on_message=take, on_room=step.set)
            for it in (True, False)
        ]
        for _ in range(repeat):
            since = time.process_time()
            for _ in range(num_steps):
                step.clear()
                message = encoder.encode(ToWorker([], outputs, {}, {}, {}, []))
                while not ends[0].send(message):  # before both ends have met
                    await step.wait()
                    step.clear()
                await step.wait()
            best = min(best, time.process_time() - since)
        for end in ends:
            end.close()
    context.term()
    assert received == repeat * num_steps * batch
    return 1e6 * best / (num_steps * batch)


def measure_workers(workers: int, args: Args) -> dict[str, Any]:
    """Start a server, warm it up, and measure; a row of the table."""
    words = ["--runner", "simulated", "--api-workers", str(workers), "--no-enable-prefix-caching"]
    words += ["--max-num-seqs", str(args.streams), "--max-num-batched-tokens", "16384"]
    words += ["--step-base-ms", "1"]
    for name in ("prefill-token-us", "decode-us", "context-token-us", "query-context-ns"):
        words += [f"--step-{name}", "0"]
    lags: dict[bool, list[float]] = {True: [], False: []}  # of the engine's loop, of the workers'
    with serving(*words) as server:

        async def look_at_lags() -> None:
            while True:
                text = await asyncio.to_thread(server.get, "/metrics")
                for name, seconds in re.findall(r'loop_lag_seconds{process="(.*)"} (\S+)', text):
                    lags[name == "engine"].append(1e3 * float(seconds))
                await asyncio.sleep(POLL_SECONDS)

        async def run() -> None:
            looking = asyncio.create_task(look_at_lags())
            await send_streams(server.url, args.streams, args.tokens)
            looking.cancel()

        def spent() -> tuple[float, float, float]:
            others = tree(server.pid) - {server.pid}
            return time.perf_counter(), cpu_seconds(server.pid), sum(map(cpu_seconds, others))

        asyncio.run(send_streams(server.url, args.streams, 16))
        before = spent()
        asyncio.run(run())
        seconds, engine, theirs = (b - a for a, b in zip(before, spent(), strict=True))
    tokens = args.streams * args.tokens
    row = {"workers": workers, "tokens_per_s": tokens / seconds}
    row |= {"engine_us_per_token": 1e6 * engine / tokens}
    row |= {"workers_us_per_token": 1e6 * theirs / tokens}
    for is_engine, own in lags.items():
        name = "engine" if is_engine else "workers"
        row |= {f"{name}_lag_median_ms": statistics.median(own) if own else None}
        row |= {f"{name}_lag_worst_ms": max(own, default=None)}
    return row


@program.command(
    "workers",
    workers=[0, 1, 2, 4],
    streams=Opt(256, "at the same time"),
    tokens=Opt(300, "of each stream"),
    repeat=Opt(1, "runs of each; the best is told"),
)
def workers(args: Args) -> dict[str, Any]:
    """The hop to a worker, then servers with each number of them."""
    hops = {batch: asyncio.run(hop(batch)) for batch in (1, 16, 64, 256)}
    told = ", ".join(f"{batch}: {us:.2f}" for batch, us in hops.items())
    print(f"the hop, us per token by tokens of a step: {told}")
    columns = {"workers": ">7d", "tokens_per_s": ">14,.0f"}
    columns |= dict.fromkeys(("engine_us_per_token", "workers_us_per_token"), ">22.2f")
    lags = [f"{who}_lag_{what}_ms" for who in ("engine", "workers") for what in ("median", "worst")]
    table = Table(columns | dict.fromkeys(lags, ">23.2f"))
    for number in args.workers:
        runs = [measure_workers(number, args) for _ in range(args.repeat)]
        table.add(max(runs, key=lambda run: float(run["tokens_per_s"])))
    return {"hop_us_per_token": hops, "rows": table.rows}


if __name__ == "__main__":
    program.main()
