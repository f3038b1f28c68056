"""The same traffic under several configurations, on a virtual clock: which policy, by how much?

    python benchmarks/policy_ab.py configs/fcfs.yaml configs/chunked_prefill.yaml

Real engine, scheduler and policy; steps take the modelled time of the simulated runner, which
replaces the runner of each configuration. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import sys
from itertools import pairwise
from typing import Any

import msgspec

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.lab import VirtualClockEventLoop

Times = list[float]  # of one request: arrival, then each token, in virtual seconds


def make_traffic(seed: int, num_requests: int, rate: float) -> list[tuple[float, int, int]]:
    """(arrival, prompt tokens, output tokens): short chats, and one long document in ten."""
    rng = random.Random(seed)
    now, traffic = 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(rate)
        is_document = rng.random() < 0.1
        prompt = rng.randint(2500, 3900) if is_document else int(rng.lognormvariate(4.5, 0.8)) + 1
        traffic.append((now, min(prompt, 3900), rng.randint(10, 150)))
    return traffic


async def serve(config: EngineConfig, traffic: list[tuple[float, int, int]]) -> list[Times]:
    loop = asyncio.get_running_loop()
    async with AsyncEngine(config) as engine:
        start = loop.time()

        async def one(number: int, arrival: float, prompt: int, output: int) -> Times:
            await asyncio.sleep(start + arrival - loop.time())
            times = [loop.time()]
            prompt_ids = [number % 2000 + 3] * prompt  # no two prompts share a prefix
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            async for delta in engine.generate(prompt_ids, params):
                times += [loop.time()] * len(delta.token_ids)
            return times

        return await asyncio.gather(*(one(i, *request) for i, request in enumerate(traffic)))


def percentile(values: list[float], p: float) -> float:
    return sorted(values)[min(int(len(values) * p), len(values) - 1)]


def measure(requests: list[Times]) -> dict[str, float]:
    """Milliseconds, and output tokens per second."""
    first = [1e3 * (times[1] - times[0]) for times in requests]
    gaps = [1e3 * (b - a) for times in requests for a, b in pairwise(times[1:])]
    seconds = max(times[-1] for times in requests) - min(times[0] for times in requests)
    return {
        "TTFT p50": percentile(first, 0.5),
        "TTFT p99": percentile(first, 0.99),
        "gap p50": percentile(gaps, 0.5),
        "gap p99": percentile(gaps, 0.99),
        "gap max": max(gaps),
        "tokens/s": sum(len(times) - 1 for times in requests) / seconds,
    }


def run(path: str, args: argparse.Namespace) -> dict[str, float]:
    config = EngineConfig.load(path, [("runner.runner", "simulated")])
    config = msgspec.structs.replace(config, server=EngineConfig().server)
    traffic = make_traffic(args.seed, args.requests, args.rate)
    with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
        return measure(runner.run(serve(config, traffic)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("configs", nargs="+", help="YAML files that differ in the policy")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=20.0, help="arrivals per second")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    results: dict[str, Any] = {path: run(path, args) for path in args.configs}
    columns = next(iter(results.values())).keys()
    print(f"{'milliseconds':28}" + "".join(f"{name:>10}" for name in columns))
    for path, measures in results.items():
        print(f"{path:28}" + "".join(f"{value:10.1f}" for value in measures.values()))
    print(json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
