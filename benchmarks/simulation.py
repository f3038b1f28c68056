"""How fast virtual time goes: an hour of traffic under three policies, on one core.

    python benchmarks/simulation.py [--workload TRACE.csv] [--repeat 2] [--profile NAME] CONFIG...

Without a trace, an hour of invented chats: 5.5 requests a second, prompts of about 1,150 tokens and
replies of about 220, as in the Azure conversation trace of 2023. `--repeat 2` plays a trace twice,
one after the other. Printed: CPU seconds, steps, and microseconds per step and per token. The last
line is JSON.
"""

import argparse
import gc
import json
import time
from typing import Any

import msgspec

from aioserve.lab.comparison.candidates import load_candidates, prepare
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.synthetic import WorkloadSource, WorkloadSpec, generate
from aioserve.lab.workloads.workload import Workload

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


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast virtual time goes.")
    parser.add_argument("configs", nargs="*", default=CONFIGS, metavar="CONFIG")
    parser.add_argument("--workload", help="a trace (default: an hour of invented chats)")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--profile", default="example")
    args = parser.parse_args()
    candidates = load_candidates(args.configs, [("runner.profile", args.profile)])
    workload = load(args.workload, args.repeat)
    candidates, (workload,), _ = prepare(candidates, [workload], is_live=False, clip=False)
    print(f"{workload.name}: {len(workload.requests)} requests in {workload.duration:.0f} s")
    print(f"{'':16} {'CPU s':>7} {'steps':>9} {'us/step':>8} {'rows/step':>9} {'us/token':>8}")
    gc.set_threshold(100_000, 20, 20)  # as the lab's commands do
    rows = []
    for candidate in candidates:
        began = time.process_time()
        outcome = simulate(candidate.config, workload)
        seconds = time.process_time() - began
        steps = len(outcome.steps.start)
        tokens = sum(len(request.token_times) for request in outcome.requests)
        row: dict[str, Any] = {
            "config": candidate.name,
            "cpu_seconds": seconds,
            "steps": steps,
            "us_per_step": 1e6 * seconds / steps,
            "rows_per_step": tokens / steps,
            "us_per_token": 1e6 * seconds / tokens,
        }
        rows.append(row)
        name, *numbers = row.values()
        print("{:16} {:7.1f} {:9d} {:8.1f} {:9.1f} {:8.2f}".format(name, *numbers), flush=True)
    total = sum(row["cpu_seconds"] for row in rows)
    print(f"{'together':16} {total:7.1f}")
    print(json.dumps({"requests": len(workload.requests), "policies": rows, "total": total}))


if __name__ == "__main__":
    main()
