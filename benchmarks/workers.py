"""What workers in front of the engine gain, and what a token pays for the hop.

The hop by itself: outputs of a step encoded, sent, received and decoded, in one process, the least
CPU of several runs. Then the same streams from the simulated runner with `--api-workers` 0, 1, 2,
4: tokens a second, CPU per token of the engine's process and of the workers, and how late each
event loop is at worst. The client shares the machine: with few cores, what it and the workers take
is missing elsewhere, and only the CPU times say what more cores would gain. The last line of output
is JSON.
"""

import asyncio
import re
import statistics
import tempfile
import time
import uuid
from typing import Any

import zmq
from harness import Args, Opt, Program, Server, Table, cpu_seconds, send_streams, serving, tree

from aioserve.fleet.workers.messages import Line, ToWorker, decoder, encoder
from aioserve.outputs import EngineCoreOutput

POLL_SECONDS = 0.25  # between looks at the lag of the loops

program = Program(__doc__)


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


async def look_at_lags(server: Server, lags: dict[str, list[float]]) -> None:
    """Until it is cancelled."""
    while True:
        text = await asyncio.to_thread(server.get, "/metrics")
        for name, seconds in re.findall(r'event_loop_lag_seconds{process="(.*)"} (\S+)', text):
            lags.setdefault(name, []).append(float(seconds))
        await asyncio.sleep(POLL_SECONDS)


def measure(workers: int, args: Args) -> dict[str, float | None]:
    """Start a server, warm it up, and measure; a row of the table."""
    words = ["--runner", "simulated", "--api-workers", str(workers), "--no-enable-prefix-caching"]
    words += ["--max-num-seqs", str(args.streams), "--max-num-batched-tokens", "16384"]
    words += ["--step-base-ms", str(args.step_ms)]
    for name in ("prefill-token-us", "decode-us", "context-token-us", "query-context-ns"):
        words += [f"--step-{name}", "0"]
    lags: dict[str, list[float]] = {}
    with serving(*words) as server:
        asyncio.run(send_streams(server.url, args.streams, 16))

        async def run() -> None:
            looking = asyncio.create_task(look_at_lags(server, lags))
            await send_streams(server.url, args.streams, args.tokens)
            looking.cancel()

        others = tree(server.pid) - {server.pid}
        before = cpu_seconds(server.pid), sum(map(cpu_seconds, others))
        since = time.perf_counter()
        asyncio.run(run())
        seconds = time.perf_counter() - since
        spent = cpu_seconds(server.pid) - before[0], sum(map(cpu_seconds, others)) - before[1]
    tokens = args.streams * args.tokens
    theirs = [lag for name, own in lags.items() if name != "engine" for lag in own]
    return {
        "workers": workers,
        "tokens_per_s": tokens / seconds,
        "engine_us_per_token": 1e6 * spent[0] / tokens,
        "workers_us_per_token": 1e6 * spent[1] / tokens,
        **{f"engine_lag_{name}_ms": ms for name, ms in lag_of(lags.get("engine", [])).items()},
        **{f"workers_lag_{name}_ms": ms for name, ms in lag_of(theirs).items()},
    }


def lag_of(lags: list[float]) -> dict[str, float | None]:
    """Return the median and the worst in milliseconds; None of none."""
    if not lags:
        return {"median": None, "worst": None}
    return {"median": 1e3 * statistics.median(lags), "worst": 1e3 * max(lags)}


@program.command(
    workers=[0, 1, 2, 4],
    streams=Opt(256, "at the same time"),
    tokens=Opt(300, "of each stream"),
    step_ms=Opt(1.0, "milliseconds that a simulated step takes"),
    repeat=Opt(1, "runs of each; the best is told"),
)
def main(args: Args) -> dict[str, Any]:
    """The hop, then servers with each number of workers."""
    hops = {batch: asyncio.run(hop(batch)) for batch in (1, 16, 64, 256)}
    told = ", ".join(f"{batch}: {us:.2f}" for batch, us in hops.items())
    print(f"the hop, us per token by tokens of a step: {told}")
    columns = {"workers": ">7d", "tokens_per_s": ">14,.0f"}
    columns |= dict.fromkeys(("engine_us_per_token", "workers_us_per_token"), ">22.2f")
    lags = [f"{who}_lag_{what}_ms" for who in ("engine", "workers") for what in ("median", "worst")]
    table = Table(columns | dict.fromkeys(lags, ">23.2f"))
    for workers in args.workers:
        runs = [measure(workers, args) for _ in range(args.repeat)]
        table.add(max(runs, key=lambda run: run["tokens_per_s"] or 0.0))
    return {"hop_us_per_token": hops, "rows": table.rows}


if __name__ == "__main__":
    program.main()
