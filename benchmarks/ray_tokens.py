"""What a token and a request cost behind Ray Serve, beside the plain server: processor time.

One plain server and one application on a local Ray, one replica each, with the simulated runner;
the same loads go to each way in turn, round after round: 64 streams, then short requests. Processor
time is that of all processes of a way together (of Ray: its daemons, proxy, ingress and replica),
without the client, which shares the machine. The last line of output is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from workers import Stream, send_all  # noqa: E402

STEP = {
    "prefill_token_us": 0,
    "decode_us": 0,
    "context_token_us": 0,
    "query_context_ns": 0,
}


class Way(NamedTuple):
    """One way to the engine: its URL, and the processes that serve it."""

    name: str
    url: str
    processes: Callable[[], list[psutil.Process]]

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time so far, by what processes are."""
        found: dict[str, float] = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                part = part_of(process)
                found[part] = found.get(part, 0.0) + times.user + times.system
        return found


def part_of(process: psutil.Process) -> str:
    """What a process is, of those that a way has."""
    command = " ".join(process.cmdline())
    for mark, part in (("Ingress", "ingress"), ("engine-", "replica"), ("Proxy", "proxy")):
        if command.startswith("ray::") and mark in command:
            return part
    return "server" if "-m aioserve" in command else "the rest of Ray"


class Cost(NamedTuple):
    """What one load cost one way, per token or request."""

    parts_us: dict[str, float]  # processor time by what processes are
    rate: float  # per second

    @property
    def cpu_us(self) -> float:
        """Of all processes."""
        return sum(self.parts_us.values())


def settings_of(step_ms: float, streams: int) -> dict[str, Any]:
    """Of the engine, the same for every way."""
    return {
        "runner.runner": "simulated",
        "runner.step_base_ms": step_ms,
        **{f"runner.step_{name}": value for name, value in STEP.items()},
        "cache.enable_prefix_caching": False,
        "scheduler.max_num_seqs": streams,
        "scheduler.max_num_batched_tokens": 16384,
    }


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_plain(settings: dict[str, Any]) -> tuple[subprocess.Popen[str], Way]:
    """The plain server, when it listens."""
    command = [sys.executable, "-m", "aioserve", "--port", "0", "--log-level", "info"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stderr is not None
    url = None
    for line in server.stderr:
        if found := re.search(r"listening on (http://\S+)", line):
            url = found[1]
            break
    assert url is not None, "the server did not start"
    subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL)
    own = psutil.Process(server.pid)
    return server, Way("plain server", url, lambda: [own, *own.children(recursive=True)])


def start_ray(settings: dict[str, Any]) -> list[Way]:
    """The application on a Ray of its own: through its proxy, and by the port of the ingress."""
    import ray
    from ray import serve

    from aioserve.fleet.ray import build_app

    port, direct = free_port(), free_port()
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    cpu = {"num_cpus": 0.1}
    model: dict[str, Any] = {"settings": settings, "ray_actor_options": cpu, "router": "least_work"}
    model["direct_port"] = direct
    app: dict[str, Any] = {"models": [model], "ingress_actor_options": cpu}
    ways = [
        Way("Ray, direct_port", f"http://127.0.0.1:{direct}", of_ray),
        Way("Ray, its proxy", f"http://127.0.0.1:{port}", of_ray),
    ]
    serve.run(build_app(app), name="aioserve", route_prefix="/")
    return ways


def of_ray() -> list[psutil.Process]:
    """All that this process has started for Ray, the server of the other way left out."""
    own = psutil.Process()
    return [
        process
        for child in own.children()
        if "aioserve" not in " ".join(child.cmdline())
        for process in (child, *child.children(recursive=True))
    ]


class Brief(Stream):
    """One request for one token, whole."""

    def __init__(self, host: str) -> None:
        body = {"prompt": "Hello", "max_tokens": 1, "ignore_eos": True}
        super().__init__(json.dumps(body).encode(), host)

    def data_received(self, data: bytes) -> None:
        self._tail += data
        if b'"usage"' in self._tail and not self.done.done():
            self.done.set_result(None)


async def send_brief(url: str, number: int, at_once: int) -> None:
    """Short requests, each on a connection of its own, some at a time."""
    host, port = url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    gate = asyncio.Semaphore(at_once)

    async def ask() -> None:
        async with gate:
            transport, brief = await loop.create_connection(lambda: Brief(host), host, int(port))
            await brief.done
            transport.close()

    await asyncio.gather(*(ask() for _ in range(number)))


def measure(way: Way, load: Callable[[], Any], count: int) -> Cost:
    """The cost of a load, per piece of `count`."""
    cpu, since = way.cpu_seconds(), time.perf_counter()
    asyncio.run(load())
    seconds = time.perf_counter() - since
    spent = {part: own - cpu.get(part, 0.0) for part, own in way.cpu_seconds().items()}
    return Cost({part: 1e6 * own / count for part, own in spent.items()}, count / seconds)


def idle(way: Way, seconds: float) -> float:
    """Processor time a second, in milliseconds, without requests."""
    cpu = sum(way.cpu_seconds().values())
    time.sleep(seconds)
    return 1e3 * (sum(way.cpu_seconds().values()) - cpu) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64, help="at the same time")
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=5.0, help="that a simulated step takes")
    parser.add_argument("--requests", type=int, default=500, help="for one token each")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    settings = settings_of(given.step_ms, given.streams)
    server, plain = start_plain(settings)
    try:
        ways = [plain, *start_ray(settings)]
        for way in ways:
            asyncio.run(send_all(way.url, given.streams, 16))
            asyncio.run(send_brief(way.url, 32, 16))
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before", flush=True)
        costs: dict[str, dict[str, list[Cost]]] = {way.name: {} for way in ways}
        for _ in range(given.rounds):
            for way in ways:
                for name, load, count in (
                    (
                        "token",
                        lambda: send_all(way.url, given.streams, given.tokens),  # noqa: B023
                        given.streams * given.tokens,
                    ),
                    (
                        "request",
                        lambda: send_brief(way.url, given.requests, given.streams),  # noqa: B023
                        given.requests,
                    ),
                ):
                    cost = measure(way, load, count)
                    costs[way.name].setdefault(name, []).append(cost)
        told: dict[str, Any] = {}
        for way in ways:
            row: dict[str, Any] = {"idle_ms_per_second": round(idle(way, 3.0), 1)}
            told[way.name] = row
            for name, found in costs[way.name].items():
                base = [cost.cpu_us for cost in costs[plain.name][name]]
                least = min(found, key=lambda cost: cost.cpu_us)
                row[f"us_per_{name}"] = round(least.cpu_us, 1)
                row[f"us_per_{name}_by_part"] = {k: round(v, 1) for k, v in least.parts_us.items()}
                row[f"{name}_ratio"] = round(
                    statistics.median(
                        cost.cpu_us / other for cost, other in zip(found, base, strict=True)
                    ),
                    2,
                )
                row[f"{name}s_per_second"] = round(max(cost.rate for cost in found))
            print(way.name, *(f"{key} {value}" for key, value in row.items()), sep="  ", flush=True)
        print(json.dumps(told))
    finally:
        server.terminate()
        server.wait()
        if "ray" in sys.modules:
            import ray
            from ray import serve

            serve.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
