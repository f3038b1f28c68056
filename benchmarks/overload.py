"""What a server does with more than it can serve, and with bad clients: overload, hostile clients.

    python benchmarks/overload.py flood [--seconds 120] [--times 10] [--plot docs/overload.svg]
    python benchmarks/overload.py hostile [--seconds 4] [--rounds 3] [--kind idle ...]

`flood`: a real server with simulated steps of 20 ms and 16 seats. First its capacity, from clients
that ask again as soon as they are answered; then half of that as Poisson arrivals, ten times of it,
and half of it again. A request counts for goodput when it has all of its tokens and the first one
came within `--slo` seconds. The table tells phases, then each limit with what was seen. With few
cores, the clients take some of the server's.

`hostile`: what slow, silent and greedy clients cost those who behave, tokens a second and the p99
gap, with and without them, in turns. A server with simulated steps of 5 ms, good clients in a
closed loop of streams, and beside them, in a process of their own, one kind of bad client at a
time. That process takes cores as well: how much is told, and it is missing where there are few.
Ratios of with to without, and how many cores more the server takes, which is what a busy machine
can tell as well: medians over rounds. The last line is JSON.
"""

import asyncio
import contextlib
import json
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import harness
import psutil
from harness import (
    Args,
    Opt,
    Panel,
    Program,
    Table,
    cpu_seconds,
    draw,
    process,
    serving,
    told_of,
)

BEGIN = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PROMPT_TOKENS = 32
OUTPUT_TOKENS = (16, 48)  # evenly between
PATIENCE = 60.0  # seconds after which a request counts as unanswered
RECOVERY_SECONDS = 5.0
MOST_GROWTH_MIB = 48.0
METRIC = re.compile(r"^aioserve_num_requests_(running|waiting) (\S+)$", re.MULTILINE)


program = Program(__doc__)


def steps_of(ms: int) -> list[str]:
    """Return arguments of a server whose steps all take `ms` milliseconds, whatever they hold."""
    words = ["--runner", "simulated", "--step-base-ms", str(ms)]
    return [*words, "--step-decode-us", "0", "--step-context-token-us", "0"]


def posted(body: bytes, more: str = "") -> bytes:
    """A whole request, perhaps with more headers."""
    return f"{BEGIN}Content-Length: {len(body)}\r\n{more}\r\n".encode() + body


# A flood.


class Asked(NamedTuple):
    """A request and what became of it; times in seconds of one clock."""

    sent: float
    status: int  # 0: no answer at all
    first: float  # of the first token; of an answer without tokens, its end
    end: float
    is_whole: bool
    retry_after: str | None

    @property
    def ttft(self) -> float:
        return self.first - self.sent


class Server(NamedTuple):
    """Where it listens, and its process."""

    host: str
    port: int
    pid: int
    most_waiting: int


async def ask(server: Server) -> Asked:
    """One streamed request on a connection of its own, read to its end."""
    prompt = [random.randrange(3, 2000) for _ in range(PROMPT_TOKENS)]
    fields = {"max_tokens": random.randint(*OUTPUT_TOKENS), "ignore_eos": True, "stream": True}
    body = json.dumps({"prompt": prompt, **fields}).encode()
    sent, first, data = time.perf_counter(), None, b""
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            try:
                writer.write(posted(body, "Connection: close\r\n"))
                while received := await reader.read(65536):
                    data += received
                    if first is None and b'"text":' in received:
                        first = time.perf_counter()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return Asked(sent, 0, time.perf_counter(), time.perf_counter(), False, None)
    end = time.perf_counter()
    status = int(data[9:12]) if data.startswith(b"HTTP/1.1 ") else 0
    told = re.search(rb"\r\nRetry-After: *([^\r]*)\r\n", data.partition(b"\r\n\r\n")[0] + b"\r\n")
    is_whole = status == 200 and b"[DONE]" in data and b'"error"' not in data
    return Asked(sent, status, first or end, end, is_whole, told and told[1].decode())


async def closed_loop(server: Server, clients: int, seconds: float, into: list[Asked]) -> None:
    """Clients, each of which asks again when it was answered."""
    until = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < until:
            into.append(await ask(server))

    await asyncio.gather(*(client() for _ in range(clients)))


async def arrivals(server: Server, rate: float, seconds: float, into: list[Asked]) -> None:
    """Poisson arrivals that wait for nothing; returns when the last of them is answered."""
    due = time.perf_counter()
    until = due + seconds

    async def one() -> None:
        into.append(await ask(server))

    async with asyncio.TaskGroup() as tasks:
        while due < until:
            await asyncio.sleep(due - time.perf_counter())
            tasks.create_task(one())
            due += random.expovariate(rate)


async def come_back(server: Server, refused: list[Asked], into: list[Asked]) -> None:
    """They do what they were told, and ask again once."""

    async def again(one: Asked) -> None:
        told = float(one.retry_after or 0)
        await asyncio.sleep(max(0.0, one.end + told - time.perf_counter()))
        into.append(await ask(server))

    await asyncio.gather(*(again(one) for one in refused))


class Watched(NamedTuple):
    """The server at a moment, from outside."""

    at: float
    resident_mib: float
    descriptors: int
    running: float
    waiting: float
    seconds: float  # that its /metrics took


async def watch(server: Server, seen: list[Watched]) -> None:
    """Read memory and queues twice a second, until cancelled."""
    looked_at = psutil.Process(server.pid)
    while True:
        since = time.perf_counter()
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        found = dict(METRIC.findall((await reader.read(-1)).decode()))
        writer.close()
        now = time.perf_counter()
        resident = looked_at.memory_info().rss / 2**20
        counts = float(found["running"]), float(found["waiting"])
        seen.append(Watched(now, resident, looked_at.num_fds(), *counts, now - since))
        await asyncio.sleep(0.5)


class Phase(NamedTuple):
    """What was asked for in a time, and what came of it."""

    name: str
    since: float
    until: float
    asked: list[Asked]

    def goodput(self, slo: float, since: float = 0.0) -> float:
        """Good requests a second that ended in the phase, but for its first `since` seconds."""
        good = [it for it in self.asked if it.is_whole and it.ttft <= slo]
        begin = self.since + since
        return sum(begin <= it.end < self.until for it in good) / (self.until - begin)

    def row(self, slo: float, seen: list[Watched]) -> dict[str, float]:
        """The phase as the table tells it."""
        seconds = self.until - self.since
        whole = [it for it in self.asked if it.is_whole]
        refused = [it for it in self.asked if it.status == 429]
        here = [it for it in seen if self.since <= it.at < self.until]
        return {
            "sent_per_s": len(self.asked) / seconds,
            "good_per_s": self.goodput(slo),
            "refused_per_s": len(refused) / seconds,
            "neither": len(self.asked) - len(whole) - len(refused),
            "ttft_p50_ms": percentile([it.ttft for it in whole], 50),
            "ttft_p99_ms": percentile([it.ttft for it in whole], 99),
            "refusal_p99_ms": percentile([it.end - it.sent for it in refused], 99),
            "waiting_max": max((it.waiting for it in here), default=0),
            "resident_max_mib": max((it.resident_mib for it in here), default=0),
        }


class Measured(NamedTuple):
    """Everything that was measured."""

    phases: list[Phase]
    seen: list[Watched]
    back: list[Asked]  # refused at the end of the flood, when they asked again


def percentile(seconds: list[float], which: float) -> float:
    """The percentile in milliseconds; 0 of an empty list."""
    return 1e3 * harness.percentile(seconds, which) if seconds else 0.0


def judge(found: Measured, server: Server, slo: float) -> dict[str, tuple[bool, str]]:
    """Each limit: whether it was held, and what was seen."""
    phases, seen, back = found
    best, before, flood, after = phases
    refused = [it for it in flood.asked if it.status == 429]
    told = [int(said) for said in (it.retry_after or "" for it in refused) if said.isdigit()]
    waits = [it.ttft for it in flood.asked if it.is_whole]
    wait, retry = (statistics.median(them) if them else 0.0 for them in (waits, told))
    statuses = Counter(it.status for phase in phases for it in phase.asked if not it.is_whole)
    others = {status: n for status, n in statuses.items() if status != 429}
    ratio = flood.goodput(slo, since=2.0) / max(best.goodput(slo, since=2.0), 1e-9)
    usual = percentile([it.ttft for it in before.asked if it.is_whole], 99)
    bound = 1.5 * usual + 50
    late = [it for it in after.asked if it.sent >= after.since + RECOVERY_SECONDS]
    p99 = percentile([it.ttft for it in late if it.is_whole], 99)
    not_served = sum(not it.is_whole for it in late)
    during = [it for it in seen if flood.since <= it.at < flood.until]
    waiting = max(it.waiting for it in during)
    resident = [it.resident_mib for it in seen if it.at < flood.since][-1]
    growth = max(it.resident_mib for it in during) - resident
    second_half = [it.resident_mib for it in during[len(during) // 2 :]]
    drift = second_half[-1] - second_half[0]
    served = sum(it.is_whole for it in back)
    return {
        "every request is served or refused with 429": (not others, f"others: {others or 0}"),
        f"at most {server.most_waiting} wait": (
            waiting <= server.most_waiting,
            f"{waiting:.0f} at most",
        ),
        f"resident memory grows by less than {MOST_GROWTH_MIB:.0f} MiB": (
            growth < MOST_GROWTH_MIB,
            f"{growth:+.1f} MiB, in the second half {drift:+.1f} MiB",
        ),
        "every 429 says when to come back": (
            len(told) == len(refused) > 0 and min(told) >= 1,
            f"{len(told)} of {len(refused)} have Retry-After",
        ),
        "that is about the wait of requests that are let in": (
            wait - 1 <= retry <= 2 * wait + 1,
            f"median {retry:.0f} s, these waited {wait:.2f} s",
        ),
        "a client that comes back after the flood as told is served": (
            served == len(back) > 0,
            f"{served} of {len(back)}",
        ),
        "goodput is at least 90% of the best": (ratio >= 0.9, f"{100 * ratio:.1f}%"),
        f"TTFT p99 is back within {RECOVERY_SECONDS:.0f} s": (
            p99 <= bound and not not_served and bool(late),
            f"{p99:.0f} ms from then on, {usual:.0f} ms before, {not_served} not served",
        ),
    }


def plot(path: Path, phases: list[Phase], seen: list[Watched], server: Server) -> None:
    """The run over time, second by second."""
    start = phases[0].since
    length = int(phases[-1].until - start)
    asked = [it for phase in phases for it in phase.asked]
    counts = {
        name: Counter(int(at - start) for at in times)
        for name, times in {
            "sent": [it.sent for it in asked],
            "served whole": [it.end for it in asked if it.is_whole],
            "refused with 429": [it.end for it in asked if it.status == 429],
        }.items()
    }
    by_second: dict[int, list[float]] = {}
    for it in asked:
        if it.is_whole:
            by_second.setdefault(int(it.sent - start), []).append(it.ttft)
    moments = [(it.at - start, it) for it in seen]
    flood = phases[2]
    draw(
        path,
        f"Capacity, half of it, {flood.name} of it, half again",
        [
            Panel(
                "requests a second",
                {n: [(s, c[s]) for s in range(length)] for n, c in counts.items()},
            ),
            Panel(
                "served whole, a second",
                {"served": [(s, counts["served whole"][s]) for s in range(length)]},
            ),
            Panel(
                "time to the first token, ms, by the second of sending",
                {
                    name: [(s, percentile(by_second[s], p)) for s in sorted(by_second)]
                    for name, p in (("p50", 50.0), ("p99", 99.0))
                },
            ),
            Panel(
                "requests in the engine",
                {
                    "waiting": [(at, it.waiting) for at, it in moments],
                    "running": [(at, it.running) for at, it in moments],
                },
            ),
            Panel("resident memory, MiB", {"": [(at, it.resident_mib) for at, it in moments]}),
        ],
        {"overload": (flood.since - start, flood.until - start)},
    )


async def measure(server: Server, given: Args) -> Measured:
    """All phases, one after the other."""
    found = Measured([], [], [])
    watching = asyncio.create_task(watch(server, found.seen))
    going: list[asyncio.Task[None]] = []

    async def begin(name: str, rate: float | None, seconds: float) -> Phase:
        since = time.perf_counter()
        phase = Phase(name, since, since + seconds, [])
        found.phases.append(phase)
        if rate is None:
            asking = closed_loop(server, 2 * given.seats, seconds, phase.asked)
        else:
            asking = arrivals(server, rate, seconds, phase.asked)
        going.append(asyncio.create_task(asking))
        await asyncio.sleep(seconds)
        return phase

    capacity = (await begin("capacity", None, given.calm)).goodput(given.slo, since=2.0)
    capacity = max(capacity, 1.0)
    await asyncio.wait(going)
    await begin("half of it", capacity / 2, given.calm)
    await asyncio.wait(going)
    flood = await begin(f"{given.times:g} times", capacity * given.times, given.seconds)
    refused = [it for it in flood.asked if it.status == 429][-given.seats // 2 :]
    going.append(asyncio.create_task(come_back(server, refused, found.back)))
    await begin("half again", capacity / 2, given.calm + RECOVERY_SECONDS)
    await asyncio.gather(*going)
    watching.cancel()
    return found


@program.command(
    "flood",
    words={"flags": Opt([], "more flags of the server, after --")},
    seconds=Opt(120.0, "of overload"),
    calm=Opt(15.0, "seconds of each other phase"),
    times=Opt(10.0, "the capacity"),
    seats=Opt(16, "requests that run at once"),
    waiting=Opt(32, "requests that may wait"),
    slo=Opt(4.0, "seconds to the first token"),
    api_workers=0,
    plot=Opt(Path, "an SVG file to write"),
)
async def flood(given: Args) -> dict[str, Any]:
    """Start the server, measure, print."""
    random.seed(0)
    words = [*steps_of(20), "--max-num-seqs", str(given.seats)]
    words += ["--max-waiting-requests", str(given.waiting)]
    words += ["--api-workers", str(given.api_workers), *given.flags]
    with serving(*words) as started:
        server = Server(*started.address, started.pid, given.waiting)
        found = await measure(server, given)
    phases, seen, _ = found
    names = list(phases[0].row(given.slo, seen))
    table = Table({"phase": "<10", **dict.fromkeys(names, "17,.1f")})
    for phase in phases:
        table.add({"phase": phase.name, **phase.row(given.slo, seen)})
    limits, _ = told_of(judge(found, server, given.slo))
    if given.plot:
        plot(given.plot, phases, seen, server)
    return {"phases": table.rows, "limits": limits}


# Hostile clients.


BODY = {"prompt": "Hello", "max_tokens": 100, "ignore_eos": True, "stream": True}


async def good_client(host: str, port: int, gaps: list[float]) -> None:
    """Streams, one after the other, on connections of its own; notes how far tokens are apart."""
    body = json.dumps(BODY).encode()
    while True:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(posted(body))
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


class Behaved(NamedTuple):
    """What those who behave got, and what it cost."""

    rate: float  # tokens a second
    gap: float  # p99, ms
    cores: float  # that the server took


async def beside(host: str, port: int, server: int, arguments: Args) -> Behaved:
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
    return Behaved(len(gaps) / elapsed, percentile(gaps, 99), cpu / elapsed)


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
    """Start eight streams that no client reads; their tokens are computed like those of others."""
    body = json.dumps({**BODY, "max_tokens": 3000}).encode()
    held = []
    for _ in range(8):
        reader, writer = await asyncio.open_connection(host, port)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(posted(body))
        held.append((reader, writer))
    await asyncio.sleep(3600)


async def half_closes(host: str, port: int) -> None:
    """Fifty a second who ask and close their half at once."""
    body = json.dumps(BODY).encode()
    while True:
        async with connected(host, port) as (reader, writer):
            writer.write(posted(body))
            writer.write_eof()
            await asyncio.wait([asyncio.ensure_future(reader.read(4096))], timeout=1)
        await asyncio.sleep(0.02)


KINDS: dict[str, Callable[[str, int], Coroutine[Any, Any, None]]] = {
    "idle": idle,
    "slow heads": drip(BEGIN.encode(), b"X-A: b\r\n"),
    "slow bodies": drip(f"{BEGIN}Content-Length: 10000\r\n\r\n".encode(), b" "),
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


async def compare(
    kind: str, host: str, port: int, server: int, arguments: Args
) -> dict[str, float]:
    """One kind of bad client: medians over rounds."""
    rates, gaps, more, cpu = [], [], [], []
    for _ in range(arguments.rounds):
        without = await beside(host, port, server, arguments)
        with process(__file__, "be", kind, host, str(port)) as bad:
            await asyncio.sleep(2)  # it starts, and opens its connections
            before = cpu_seconds(bad.pid)
            theirs = await beside(host, port, server, arguments)
            cpu.append((cpu_seconds(bad.pid) - before) / arguments.seconds)
            if bad.poll() is not None:
                raise RuntimeError(f"{kind}: the bad clients have ended")
        rates.append(theirs.rate / without.rate)
        gaps.append(theirs.gap / without.gap)
        more.append(theirs.cores - without.cores)
    return {
        "tokens/s": round(statistics.median(rates), 3),
        "p99 gap": round(statistics.median(gaps), 3),
        "cores more": round(statistics.median(more), 3),
        "their cores": round(statistics.median(cpu), 2),
    }


@program.command("hostile", streams=16, seconds=4.0, rounds=3, kind=Opt(list(KINDS), choices=KINDS))
async def hostile(args: Args) -> dict[str, Any]:
    """What each kind of bad client costs those who behave."""
    columns = {"tokens/s": "10.2f", "p99 gap": "10.2f", "cores more": "11.3f"}
    table = Table({"beside": "<18", **columns, "their cores": "13.2f"})
    with serving(*steps_of(5)) as server:
        for kind in args.kind:
            found = await compare(kind, *server.address, server.pid, args)
            table.add({"beside": kind, **found})
    return {"rows": table.rows}


@program.command("be", {"kind": str, "host": str, "port": int})
async def be(args: Args) -> None:
    """Be a bad client, until the process is ended."""
    await KINDS[args.kind](args.host, args.port)


if __name__ == "__main__":
    program.main()
