"""The same requests to a simulated fleet and to a live one on Ray: do routers differ alike?

    python benchmarks/ray_fidelity.py

Two replicas with the simulated runner, whose steps take their time for real on a local Ray, and
none in virtual time. One router after the other, live on new replicas. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray_routers import measure, told  # noqa: E402

from aioserve.lab.comparison.candidates import load_candidates, prepare  # noqa: E402
from aioserve.lab.simulation.fleet import simulate_fleet  # noqa: E402
from aioserve.lab.simulation.fleet_plan import Fleet  # noqa: E402
from aioserve.lab.workloads.synthetic import WorkloadSource  # noqa: E402
from aioserve.lab.workloads.workload import Workload  # noqa: E402

#: Five times as long as the steps of the README, so that a busy machine is on time.
SETTINGS: dict[str, Any] = {
    "runner.runner": "simulated",
    "runner.step_base_ms": 20.0,
    "runner.step_prefill_token_us": 250.0,
    "runner.step_decode_us": 500.0,
    "cache.num_kv_blocks": 4096,
}


def simulate(router: str, workload: Workload, delay: float) -> dict[str, float]:
    """The same in virtual time, where the router hears of all after `delay` seconds."""
    settings = [(name, str(value)) for name, value in SETTINGS.items() if name != "runner.runner"]
    candidates = load_candidates(["chunked_prefill"], settings)
    (one,), (workload,), _ = prepare(candidates, [workload], is_live=False, clip=True)
    fleet = Fleet(2, router, knowledge_delay=delay)
    outcome = simulate_fleet(one.config, workload, fleet)
    requests = [request for request in outcome.requests if request.is_finished]
    sent = Counter(outcome.replica_of)
    prompts = sum(request.num_prompt_tokens for request in workload.requests)
    return {
        "hit_rate": sum(request.num_cached_tokens for request in requests) / prompts,
        **told("ttft", [request.ttft for request in requests]),
        **told("e2e", [request.end - request.arrival for request in requests]),
        "busiest_share": max(sent.values()) / len(workload.requests),
        "seconds": outcome.end,
        "num_failed": len(workload.requests) - len(requests),
    }


def line(router: str, how: str, row: dict[str, float]) -> str:
    """A row of the table."""
    times = "  ".join(
        f"{name} "
        + " / ".join(f"{1e3 * row[f'{name}_{key}']:.0f}" for key in ("mean", "p50", "p99"))
        for name in ("ttft", "e2e")
    )
    return (
        f"{router:12} {how:9}  {100 * row['hit_rate']:.1f}% of prompt tokens cached, {times} ms, "
        f"busiest replica {100 * row['busiest_share']:.0f}%, {row['num_failed']:.0f} failed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="sessions")
    parser.add_argument("--limit", type=int, default=70, help="requests")
    parser.add_argument("--time-scale", type=float, default=2.0)
    parser.add_argument("--routers", nargs="+", default=["least_work", "prefix"])
    parser.add_argument("--delay", type=float, default=0.03, help="of knowledge, simulated, in s")
    given = parser.parse_args()
    source = WorkloadSource(path=given.workload, limit=given.limit, time_scale=given.time_scale)
    workload = source.load(0)
    found = {}
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20
    )
    serve.start(http_options={"host": "127.0.0.1", "port": 0, "location": "NoServer"})
    print(
        f"{len(workload.requests)} requests in {workload.duration:.0f} s, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f} before"
    )
    try:
        for router in given.routers:
            simulated = simulate(router, workload, given.delay)
            print(line(router, "simulated", simulated), flush=True)
            live = asyncio.run(measure(router, workload, SETTINGS))
            print(line(router, "live", live), flush=True)
            found[router] = {"simulated": simulated, "live": live}
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
