"""What a simulated fleet costs per request, and what a router's decision and a KV event do.

    python benchmarks/fleet.py run --workload TRACE --replicas 1000 --router least_work --copies 23
    python benchmarks/fleet.py decisions

The first prints CPU seconds and microseconds per request of one run; with `--profile-calls` where
they went. The second asks each router about prompts of 26 blocks, the first of which every replica
holds. Both take CPU time: other processes make it longer, by sharing caches and cores.
"""

import argparse
import cProfile
import gc
import os
import pstats
import random
import time
from contextlib import nullcontext

from aioserve.fleet.routing import ReplicaReport, RoutedRequest, available_routers, make_dispatcher
from aioserve.kv_cache.block_pool import BlockStored
from aioserve.lab.comparison.candidates import load_candidates, prepare
from aioserve.lab.simulation.fleet import simulate_fleet
from aioserve.lab.simulation.fleet_plan import Fleet
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.support.arguments import assignment

H200 = [
    ("runner.profile", "h200-llama-8b-roofline"),
    ("cache.block_size", "64"),
    ("cache.num_kv_blocks", "13000"),
    ("scheduler.options.chunk_size", "2048"),
]
NUM_BLOCKS, NUM_ASKED, ROUNDS = 26, 40, 5


def run(args: argparse.Namespace) -> None:
    """One simulation."""
    source = WorkloadSource(
        path=args.workload, limit=args.limit, copies=args.copies, time_scale=args.time_scale
    )
    candidates = load_candidates(["chunked_prefill"], [*H200, *args.set])
    (one,), (workload,), _ = prepare(candidates, [source.load(0)], is_live=False, clip=True)
    gc.set_threshold(100_000, 20, 20)  # as the lab's commands do
    calls = cProfile.Profile() if args.profile_calls else None
    began = time.process_time()
    with calls or nullcontext():
        outcome = simulate_fleet(one.config, workload, Fleet(args.replicas, args.router))
    seconds, num_requests = time.process_time() - began, len(workload.requests)
    busy = sum(outcome.busy_seconds) / args.replicas / outcome.end
    print(
        f"{num_requests} requests, {outcome.num_steps} steps in {outcome.end:.0f} s on "
        f"{args.replicas} replicas, {100 * busy:.0f}% busy: {seconds:.1f} s of CPU, "
        f"{1e6 * seconds / num_requests:.0f} us a request"
    )
    if calls is not None:
        pstats.Stats(calls).sort_stats("tottime").print_stats(30)


def decisions(args: argparse.Namespace) -> None:
    """Each router with 10, 1,000 and 10,000 replicas."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description="What simulated fleets and routers cost.")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("--workload", required=True)
    one.add_argument("--replicas", type=int, default=10)
    one.add_argument("--router", default="least_work")
    one.add_argument("--limit", type=int)
    one.add_argument("--copies", type=int, default=1)
    one.add_argument("--time-scale", type=float, default=1.0)
    one.add_argument("--set", action="append", default=[], type=assignment)
    one.add_argument("--profile-calls", action="store_true")
    one.set_defaults(command=run)
    commands.add_parser("decisions").set_defaults(command=decisions)
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
