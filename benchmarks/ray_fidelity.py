"""The same requests to a simulated fleet and to a live one on Ray: do routers differ alike?

    python benchmarks/ray_fidelity.py

Two replicas with the simulated runner, whose steps take their time for real on a local Ray, and
none in `compare --fleet`. One router after the other, live on new replicas. The last line is JSON.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray_routers import measure  # noqa: E402

from aioserve.lab.workloads.source import WorkloadSource  # noqa: E402

#: Five times as long as the steps of the README, so that a busy machine is on time.
SETTINGS: dict[str, Any] = {
    "runner.runner": "simulated",
    "runner.step_base_ms": 20.0,
    "runner.step_prefill_token_us": 250.0,
    "runner.step_decode_us": 500.0,
    "cache.num_kv_blocks": 4096,
}


def simulate(given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What `compare --fleet` finds, by router."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "aioserve", "compare", "chunked_prefill"]
        command += ["--workload", given.workload, "--limit", str(given.limit), "--seeds", "1"]
        command += ["--time-scale", str(given.time_scale), "--fleet", "2", "--json", str(path)]
        command += ["--routers", *given.routers]
        for name, value in SETTINGS.items():
            if name != "runner.runner":
                command += ["--set", f"{name}={value}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        results = json.loads(path.read_text())["results"]
    return {
        router: {
            "hit_rate": result["totals"]["prefix_hit_share"],
            "ttft_p50": result["durations"]["ttft"]["p50"],
            "ttft_p99": result["durations"]["ttft"]["p99"],
        }
        for router, result in zip(given.routers, results, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", default="sessions")
    parser.add_argument("--limit", type=int, default=70, help="requests")
    parser.add_argument("--time-scale", type=float, default=2.0)
    parser.add_argument("--routers", nargs="+", default=["round_robin", "prefix"])
    given = parser.parse_args()
    live: dict[str, dict[str, float]] = {}
    found = {"simulated": simulate(given), "live": live}
    source = WorkloadSource(path=given.workload, limit=given.limit, time_scale=given.time_scale)
    workload = source.load(0)
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
            live[router] = asyncio.run(measure(router, workload, SETTINGS))
            for how in ("simulated", "live"):
                row = found[how][router]
                print(
                    f"{router:12} {how:9}  {100 * row['hit_rate']:.1f}% of prompt tokens cached, "
                    f"TTFT p50 {1e3 * row['ttft_p50']:.0f} ms, p99 {1e3 * row['ttft_p99']:.0f} ms",
                    flush=True,
                )
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
