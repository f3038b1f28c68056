"""What slow, silent and greedy clients cost those who behave: tokens a second and the p99 gap.

With and without them, in turns:

    python benchmarks/hostile.py [--streams 16] [--seconds 4] [--rounds 3] [--kind idle ...]

A server with simulated steps of 5 ms, good clients in a closed loop of streams, and beside them, in
a process of their own, one kind of bad client at a time. That process takes cores as well: how much
is told, and it is missing where there are few. Ratios of with to without, and how many cores more
the server takes, which is what a busy machine can tell as well: medians over rounds. The last line
is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

from harness import Args, Opt, Program, Table, cpu_seconds, percentile, process, serving

# A step takes as long whoever is in it: what bad clients ask for costs no step time.
STEPS = ["--step-base-ms", "5", "--step-decode-us", "0", "--step-context-token-us", "0"]
SERVER = ["--runner", "simulated", *STEPS]
BODY = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True}
BEGIN = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD = BEGIN + "Content-Length: {}\r\n\r\n"


# Those who behave.


async def good_client(host: str, port: int, gaps: list[float]) -> None:
    """Streams, one after the other, on connections of its own; notes how far tokens are apart."""
    body = json.dumps(BODY).encode()
    while True:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(HEAD.format(len(body)).encode() + body)
        last, tail = None, b""
        while b"[DONE]" not in tail:
            data = await reader.read(65536)
            if not data:
                raise ConnectionError(f"a good client was cut off: {tail!r}")
            now = time.perf_counter()
            num_tokens = data.count(b'"text":')
            if last is not None and num_tokens:
                gaps.extend([now - last] + [0.0] * (num_tokens - 1))
            last, tail = now, (tail + data)[-64:]
        writer.close()


class Measured(NamedTuple):
    """What those who behave got, and what it cost."""

    rate: float  # tokens a second
    gap: float  # p99, ms
    cores: float  # that the server took


async def measure(host: str, port: int, server: int, arguments: Args) -> Measured:
    """Measure a server for `arguments.seconds`; `server` is its process."""
    gaps: list[float] = []
    clients = (good_client(host, port, gaps) for _ in range(arguments.streams))
    tasks = [asyncio.create_task(client) for client in clients]
    await asyncio.sleep(0.5)  # until all stream
    gaps.clear()
    since, before = time.perf_counter(), cpu_seconds(server)
    await asyncio.wait(tasks, timeout=arguments.seconds, return_when=asyncio.FIRST_EXCEPTION)
    elapsed, cpu = time.perf_counter() - since, cpu_seconds(server) - before
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return Measured(len(gaps) / elapsed, 1e3 * percentile(gaps, 99), cpu / elapsed)


# Those who do not: each until the process is ended.


@contextlib.asynccontextmanager
async def connected(
    host: str, port: int
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, whatever becomes of it."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        with contextlib.suppress(ConnectionError):
            yield reader, writer
    finally:
        writer.transport.abort()


async def idle(host: str, port: int) -> None:
    """2,000 of them say nothing."""
    held = [await asyncio.open_connection(host, port) for _ in range(2000)]
    await asyncio.sleep(3600)
    del held


def drip(begin: bytes, piece: bytes) -> Callable[[str, int], Coroutine[Any, Any, None]]:
    """200 who send a bit a second."""

    async def one(host: str, port: int) -> None:
        while True:
            async with connected(host, port) as (_, writer):
                writer.write(begin)
                while not writer.is_closing():
                    await asyncio.sleep(1)
                    writer.write(piece)
                    await writer.drain()

    async def many(host: str, port: int) -> None:
        await asyncio.gather(*(one(host, port) for _ in range(200)))

    return many


def again(data: bytes, per_second: float) -> Callable[[str, int], Coroutine[Any, Any, None]]:
    """Sends it on a new connection so often, and reads what comes."""

    async def send(host: str, port: int) -> None:
        while True:
            due = time.perf_counter() + 1 / per_second
            async with connected(host, port) as (reader, writer):
                writer.write(data)
                await asyncio.wait([asyncio.ensure_future(reader.read(4096))], timeout=2)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))

    return send


async def never_reads(host: str, port: int) -> None:
    """Eight streams that nobody reads: their tokens are computed, as everybody's."""
    body = json.dumps({**BODY, "max_tokens": 3000}).encode()
    held = []
    for _ in range(8):
        reader, writer = await asyncio.open_connection(host, port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(HEAD.format(len(body)).encode() + body)
        held.append((reader, writer))
    await asyncio.sleep(3600)


async def half_closes(host: str, port: int) -> None:
    """Fifty a second who ask and close their half at once."""
    body = json.dumps(BODY).encode()
    while True:
        async with connected(host, port) as (reader, writer):
            writer.write(HEAD.format(len(body)).encode() + body)
            writer.write_eof()
            await asyncio.wait([asyncio.ensure_future(reader.read(4096))], timeout=1)
        await asyncio.sleep(0.02)


def posted(body: bytes) -> bytes:
    """A whole request."""
    return HEAD.format(len(body)).encode() + body


KINDS: dict[str, Callable[[str, int], Coroutine[Any, Any, None]]] = {
    "idle": idle,
    "slow heads": drip(BEGIN.encode(), b"X-A: b\r\n"),
    "slow bodies": drip(HEAD.format(10_000).encode(), b" "),
    "1 MB of headers": again(b"GET / HTTP/1.1\r\n" + b"X-A: " + b"a" * 2**20, 10),
    "64 MB of body": again(posted(bytes(2**26)), 1),
    "64 MB in chunks": again(
        BEGIN.encode() + b"Transfer-Encoding: chunked\r\n\r\n4000000\r\n" + bytes(2**26),
        1,
    ),
    "invalid UTF-8": again(posted(b'{"prompt": "\xff"}'), 50),
    "deep JSON": again(posted(b'{"prompt": ' + b"[" * 100_000), 50),
    "no HTTP": again(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10, 50),
    "never reads": never_reads,
    "half-closes": half_closes,
}


# The measurement.


async def compare(
    kind: str, host: str, port: int, server: int, arguments: Args
) -> dict[str, float]:
    """One kind of bad client: medians over rounds."""
    rates, gaps, more, cpu = [], [], [], []
    for _ in range(arguments.rounds):
        without = await measure(host, port, server, arguments)
        with process(__file__, "--hostile", kind, host, str(port)) as bad:
            await asyncio.sleep(2)  # it starts, and opens its connections
            before = cpu_seconds(bad.pid)
            beside = await measure(host, port, server, arguments)
            cpu.append((cpu_seconds(bad.pid) - before) / arguments.seconds)
            if bad.poll() is not None:
                raise RuntimeError(f"{kind}: the bad clients have ended")
        rates.append(beside.rate / without.rate)
        gaps.append(beside.gap / without.gap)
        more.append(beside.cores - without.cores)
    return {
        "tokens/s": round(statistics.median(rates), 3),
        "p99 gap": round(statistics.median(gaps), 3),
        "cores more": round(statistics.median(more), 3),
        "their cores": round(statistics.median(cpu), 2),
    }


program = Program(__doc__)


@program.command(
    streams=16,
    seconds=4.0,
    rounds=3,
    kind=Opt(list(KINDS), choices=KINDS),
    hostile=Opt([], argparse.SUPPRESS),
)
async def main(args: Args) -> dict[str, Any] | None:
    """Measure each kind of bad client, or be one."""
    if args.hostile:
        kind, host, port = args.hostile
        await KINDS[kind](host, int(port))
        return None
    columns = {"tokens/s": "10.2f", "p99 gap": "10.2f", "cores more": "11.3f"}
    table = Table({"beside": "<18", **columns, "their cores": "13.2f"})
    with serving(*SERVER) as server:
        for kind in args.kind:
            found = await compare(kind, *server.address, server.pid, args)
            table.add({"beside": kind, **found})
    return {"rows": table.rows}


if __name__ == "__main__":
    program.main()
