"""What workers in front of the engine gain, and what a token pays for the hop.

The hop by itself: outputs of a step encoded, sent, received and decoded, in one process, the least
CPU of several runs. Then the same streams from the simulated runner with `--api-workers` 0, 1, 2,
4: tokens a second, CPU per token of the engine's process and of the workers, and how late each
event loop is at worst. The client shares the machine: with few cores, what it and the workers take
is missing elsewhere, and only the CPU times say what more cores would gain. The last line of output
is JSON.
"""

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from pathlib import Path
from typing import NamedTuple

import zmq

from aioserve.fleet.workers.messages import Line, ToWorker, decoder, encoder
from aioserve.outputs import EngineCoreOutput

ROOT = Path(__file__).parents[1]
POLL_SECONDS = 0.25  # between looks at the lag of the loops
TICK = 1 / os.sysconf("SC_CLK_TCK")


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


class Run(NamedTuple):
    """What one number of workers brought."""

    workers: int
    seconds: float
    tokens: int
    engine_cpu: float  # seconds
    workers_cpu: float  # of all together
    lags: dict[str, list[float]]  # by process, seconds

    def row(self) -> dict[str, float | int | None]:
        """As it is told."""
        workers = [lag for name, own in self.lags.items() if name != "engine" for lag in own]
        return {
            "workers": self.workers,
            "tokens_per_second": round(self.tokens / self.seconds),
            "engine_us_per_token": round(1e6 * self.engine_cpu / self.tokens, 2),
            "workers_us_per_token": round(1e6 * self.workers_cpu / self.tokens, 2),
            "engine_lag_worst_ms": worst_ms(self.lags.get("engine", [])),
            "workers_lag_worst_ms": worst_ms(workers),
        }


def worst_ms(lags: list[float]) -> float | None:
    """None of none."""
    return round(1e3 * max(lags), 2) if lags else None


class Stream(asyncio.Protocol):
    """One streamed request on a connection of its own: only counts what comes."""

    def __init__(self, body: bytes, host: str) -> None:
        self._request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
            "Content-Type: application/json\r\n\r\n"
        ).encode() + body
        self._tail = b""
        self.num_bytes = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._tail = (self._tail + data)[-64:]
        if b"data: [DONE]" in self._tail and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"a stream broke off: {self._tail!r}"))


async def send_all(url: str, num_streams: int, num_tokens: int) -> None:
    """All streams at once, to their ends."""
    host, port = url.removeprefix("http://").split(":")
    body = {"prompt": "Hello", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    loop = asyncio.get_running_loop()
    streams = []
    for _ in range(num_streams):
        transport, stream = await loop.create_connection(
            lambda: Stream(json.dumps(body).encode(), host), host, int(port)
        )
        streams.append((transport, stream))
    await asyncio.gather(*(stream.done for _, stream in streams))
    for transport, _ in streams:
        transport.close()


async def look_at_lags(url: str, lags: dict[str, list[float]]) -> None:
    """Until it is cancelled."""
    while True:
        text = await asyncio.to_thread(read, f"{url}/metrics")
        for name, seconds in re.findall(r'event_loop_lag_seconds{process="(.*)"} (\S+)', text):
            lags.setdefault(name, []).append(float(seconds))
        await asyncio.sleep(POLL_SECONDS)


def read(url: str) -> str:
    """Of a server that may be busy."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return str(response.read().decode())


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK


def children_of(pid: int) -> list[int]:
    """The processes that it has started."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def measure(workers: int, given: argparse.Namespace) -> Run:
    """Start a server, warm it up, and measure."""
    command = [sys.executable, "-m", "aioserve", "--runner", "simulated", "--port", "0"]
    command += ["--api-workers", str(workers), "--log-level", "info", "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", str(given.streams), "--max-num-batched-tokens", "16384"]
    command += ["--step-base-ms", str(given.step_ms)]
    for name in ("prefill-token-us", "decode-us", "context-token-us", "query-context-ns"):
        command += [f"--step-{name}", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stderr is not None
    try:
        url = None
        for line in server.stderr:
            if found := re.search(r"listening on (http://\S+)", line):
                url = found[1]
                break
        assert url is not None, "the server did not start"
        drain = subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        asyncio.run(send_all(url, given.streams, 16))
        pids = children_of(server.pid) if workers else []
        lags: dict[str, list[float]] = {}

        async def run() -> None:
            looking = asyncio.create_task(look_at_lags(url, lags))
            await send_all(url, given.streams, given.tokens)
            looking.cancel()

        engine, others = cpu_seconds(server.pid), sum(map(cpu_seconds, pids))
        since = time.perf_counter()
        asyncio.run(run())
        return Run(
            workers,
            time.perf_counter() - since,
            given.streams * given.tokens,
            cpu_seconds(server.pid) - engine,
            sum(map(cpu_seconds, pids)) - others,
            lags,
        )
    finally:
        server.terminate()
        server.wait()
        drain.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2, 4], metavar="N")
    parser.add_argument("--streams", type=int, default=256, help="at the same time")
    parser.add_argument("--tokens", type=int, default=300, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=1.0, help="that a simulated step takes")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; the best is told")
    given = parser.parse_args()
    print(
        f"{given.streams} streams of {given.tokens} tokens, steps of {given.step_ms:g} ms, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before"
    )
    hops = {batch: round(asyncio.run(hop(batch)), 2) for batch in (1, 16, 64, 256)}
    print("the hop, us per token by tokens of a step:", hops, flush=True)
    rows = []
    for workers in given.workers:
        runs = [measure(workers, given) for _ in range(given.repeat)]
        rows.append(min(runs, key=lambda run: run.seconds).row())
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    told = {"streams": given.streams, "tokens": given.tokens, "hop_us_per_token": hops}
    print(json.dumps({**told, "rows": rows}))


if __name__ == "__main__":
    main()
