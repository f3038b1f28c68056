"""What simulation costs: virtual time, a simulated fleet, a router's decision and a KV event.

    python benchmarks/fleet.py hour [CONFIG ...] [--workload TRACE.csv] [--repeat 2]
    python benchmarks/fleet.py run --workload TRACE --replicas 1000 --router least_work --copies 23
    python benchmarks/fleet.py decisions

`hour`: how fast virtual time goes: an hour of traffic under three policies, on one core. Without a
trace, an hour of invented chats: 5.5 requests a second, prompts of about 1,150 tokens and replies
of about 220, as in the Azure conversation trace of 2023. `--repeat 2` plays a trace twice, one
after the other. CPU seconds, steps, and microseconds per step and per token.

`run` prints CPU seconds and microseconds per request of one run. `decisions` asks each router about
prompts of 26 blocks, the first of which every replica holds. All take CPU time: other processes
make it longer, by sharing caches and cores. The last line is JSON.
"""

import gc
import os
import random
import time
from typing import Any

import msgspec
from harness import Args, Opt, Program, Table

from aioserve.fleet.routing import ReplicaReport, RoutedRequest, available_routers, make_dispatcher
from aioserve.kv_cache.block_pool import BlockStored
from aioserve.lab.comparison.candidates import load_candidates, prepare
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.synthetic import WorkloadSource, WorkloadSpec, generate
from aioserve.lab.workloads.workload import Workload

H200 = [
    ("runner.profile", "h200-llama-8b-roofline"),
    ("cache.block_size", "64"),
    ("cache.num_kv_blocks", "13000"),
    ("scheduler.options.chunk_size", "2048"),
]
NUM_BLOCKS, NUM_ASKED, ROUNDS = 26, 40, 5
CONFIGS = [f"configs/{name}.yaml" for name in ("fcfs", "chunked_prefill", "priority")]
AN_HOUR_OF_CHATS = {
    "arrivals": {"kind": "poisson", "rate": 5.5},
    "duration": 3600,
    "classes": [
        {
            "name": "chat",
            "prompt": {"kind": "lognormal", "median": 760, "sigma": 0.9, "max": 4000},
            "output": {"kind": "lognormal", "median": 180, "sigma": 0.7, "max": 1000},
        }
    ],
}

program = Program(__doc__)


def load(path: str | None, repeat: int) -> Workload:
    """The traffic, `repeat` times in a row."""
    if path is None:
        return generate(msgspec.convert(AN_HOUR_OF_CHATS, WorkloadSpec), 0, "an hour of chats")
    once = WorkloadSource(path=path).load(0)
    if repeat > 1 and any(request.follows >= 0 for request in once.requests):
        raise SystemExit("conversations cannot be repeated")
    requests = [
        msgspec.structs.replace(request, arrival=request.arrival + i * once.duration)
        for i in range(repeat)
        for request in once.requests
    ]
    return msgspec.structs.replace(once, requests=tuple(requests))


@program.command(
    "hour",
    {"configs": CONFIGS},
    workload=Opt(str, "a trace; default: an hour of invented chats"),
    repeat=1,
    profile="example",
)
def hour(args: Args) -> dict[str, Any]:
    """An hour of traffic in virtual time."""
    candidates = load_candidates(args.configs, [("runner.profile", args.profile)])
    workload = load(args.workload, args.repeat)
    candidates, (workload,), _ = prepare(candidates, [workload], is_live=False, clip=False)
    title = f"{workload.name}: {len(workload.requests)} requests in {workload.duration:.0f} s"
    numbers = {"CPU s": "8.1f", "steps": "10", "us/step": "9.1f", "rows/step": "10.1f"}
    table = Table({"policy": "<16", **numbers, "us/token": "9.2f"}, title)
    gc.set_threshold(100_000, 20, 20)  # as the lab's commands do
    for candidate in candidates:
        began = time.process_time()
        outcome = simulate(candidate.config, workload)
        seconds = time.process_time() - began
        steps = len(outcome.steps.start)
        tokens = sum(len(request.token_times) for request in outcome.requests)
        row = {"CPU s": seconds, "steps": steps, "us/step": 1e6 * seconds / steps}
        row |= {"rows/step": tokens / steps, "us/token": 1e6 * seconds / tokens}
        table.add({"policy": candidate.name, **row})
    total = sum(row["CPU s"] for row in table.rows)
    print(f"{'together':16}{total:8.1f}")
    return {"requests": len(workload.requests), "policies": table.rows, "total": total}


@program.command(
    "run",
    workload=str,
    replicas=10,
    router="least_work",
    limit=int,
    copies=1,
    time_scale=1.0,
)
def run(args: Args) -> dict[str, Any]:
    """One simulation."""
    source = WorkloadSource(
        path=args.workload, limit=args.limit, copies=args.copies, time_scale=args.time_scale
    )
    candidates = load_candidates(["chunked_prefill"], H200)
    (one,), (workload,), _ = prepare(candidates, [source.load(0)], is_live=False, clip=True)
    gc.set_threshold(100_000, 20, 20)  # as the lab's commands do
    began = time.process_time()
    outcome = simulate_fleet(one.config, workload, Fleet(args.replicas, args.router))
    seconds, num_requests = time.process_time() - began, len(workload.requests)
    busy = sum(outcome.busy_seconds) / args.replicas / outcome.end
    print(
        f"{num_requests} requests, {outcome.num_steps} steps in {outcome.end:.0f} s on "
        f"{args.replicas} replicas, {100 * busy:.0f}% busy: {seconds:.1f} s of CPU, "
        f"{1e6 * seconds / num_requests:.0f} us a request"
    )
    return {"requests": num_requests, "cpu_seconds": seconds}


@program.command("decisions")
def decisions(args: Args) -> dict[str, Any]:
    """Each router with 10, 1,000 and 10,000 replicas."""
    rows = []
    for num_replicas in (10, 1000, 10_000):
        rng = random.Random(0)
        names = [f"r{i}" for i in range(num_replicas)]
        hot = os.urandom(16)
        prompts = [[hot, *(os.urandom(16) for _ in range(NUM_BLOCKS - 1))] for _ in range(200)]
        events = [(name, hot) for name in names]
        events += [(rng.choice(names), h) for prompt in prompts for h in prompt[1:]]
        sent = [RoutedRequest(num_tokens=rng.randrange(100_000)) for _ in names]
        for name in available_routers():
            router = make_dispatcher(name, clock=time.monotonic)
            for replica in names:
                router.join(replica)
            for replica, request in zip(names, sent, strict=True):
                router.assign(request, replica)
                report = ReplicaReport(num_running=request.num_tokens % 97, max_num_seqs=128)
                router.on_report(replica, lambda report=report: (report, 0.0))  # type: ignore[misc]
            began = time.process_time()
            for holder, block_hash in events:
                router.on_kv_event(holder, BlockStored(block_hash, None, []))
            of_event = (time.process_time() - began) / len(events)
            best = float("inf")
            for _ in range(ROUNDS):
                began = time.process_time()
                for i in range(NUM_ASKED):
                    asked = RoutedRequest(
                        num_tokens=NUM_BLOCKS * 512,
                        block_hashes=prompts[i],
                        block_size=512,
                        session=f"s{i}",
                    )
                    router.choose(asked)
                best = min(best, (time.process_time() - began) / NUM_ASKED)
            event = f", {1e6 * of_event:.1f} us an event" if router.kind.uses_prefixes else ""
            print(f"{num_replicas:6} replicas, {name:11}: {1e6 * best:.1f} us a decision{event}")
            rows.append({"replicas": num_replicas, "router": name, "us": 1e6 * best})
    return {"rows": rows}


if __name__ == "__main__":
    program.main()
