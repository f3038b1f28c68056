"""Ten times what a server can serve, for two minutes: what it answers, keeps, and how it recovers.

    python benchmarks/overload.py [--seconds 120] [--times 10] [--plot docs/overload.svg]

A real server with simulated steps of 20 ms and 16 seats. First its capacity, from clients that ask
again as soon as they are answered; then half of that as Poisson arrivals, ten times of it, and half
of it again. A request counts for goodput when it has all of its tokens and the first one came
within `--slo` seconds. The table tells phases, then each limit with what was seen; the last line is
JSON. With few cores, the clients take some of the server's.
"""

import asyncio
import json
import random
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import harness
import psutil
from harness import Args, Opt, Panel, Program, Table, draw, serving, told_of
from hostile import HEAD

STEPS = ["--step-base-ms", "20", "--step-decode-us", "0", "--step-context-token-us", "0"]
PROMPT_TOKENS = 32
OUTPUT_TOKENS = (16, 48)  # evenly between
PATIENCE = 60.0  # seconds after which a request counts as unanswered
RECOVERY_SECONDS = 5.0
MOST_GROWTH_MIB = 48.0
METRIC = re.compile(r"^aioserve_num_requests_(running|waiting) (\S+)$", re.MULTILINE)


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
    head = HEAD.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n").format(len(body)).encode()
    sent, first, data = time.perf_counter(), None, b""
    try:
        async with asyncio.timeout(PATIENCE):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            try:
                writer.write(head + body)
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


program = Program(__doc__)


@program.command(
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
async def main(given: Args) -> dict[str, Any]:
    """Start the server, measure, print."""
    random.seed(0)
    words = ["--runner", "simulated", *STEPS, "--max-num-seqs", str(given.seats)]
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


if __name__ == "__main__":
    program.main()
