"""Routers of Ray Serve on conversations: what they find cached, and the time to a first token.

    python benchmarks/ray_routers.py --workload mooncake_conversation.jsonl --limit 1200

A real local Ray with two replicas, simulated runners with a card's step times, and clients of this
process that come when the trace says. One router after the other: ours, Ray's power of two choices,
and Ray's own prefix router. The last line is JSON. Needs `pip install 'ray[serve]'`.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import ray
from ray import serve

from aioserve.config import EngineConfig
from aioserve.errors import AioserveError
from aioserve.fleet.ray import build_app
from aioserve.fleet.ray.front import RayFront
from aioserve.fleet.ray.settings import ModelSettings
from aioserve.lab.simulation.run import Clients
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.workload import Workload, build_prompt
from aioserve.params import SamplingParams

SETTINGS: dict[str, Any] = {
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


class FrontClients(Clients):
    """They ask replicas, through the front end that the ingress has."""

    def __init__(self, front: RayFront, workload: Workload) -> None:
        super().__init__(workload, time.perf_counter, lambda number: None)
        self._front = front
        self.ttft: list[float] = []
        self.e2e: list[float] = []
        self.num_sent: Counter[str] = Counter()  # by replica that accepted the request
        self.num_prompt_tokens = self.num_cached_tokens = self.num_failed = 0

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
            self.num_failed += 1
        return token_ids


async def measure(
    router: str, workload: Workload, settings: dict[str, Any] = SETTINGS
) -> dict[str, float]:
    """One run; the replicas, which have these settings, are new."""
    cpu = {"num_cpus": 0.1}
    model = {
        "settings": settings,
        "num_replicas": 2,
        "router": router,
        "ray_actor_options": cpu,
    }
    app = build_app({"models": [model], "ingress_actor_options": cpu})
    await asyncio.to_thread(serve.run, app, name="aioserve", route_prefix="/")
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
        "hit_rate": clients.num_cached_tokens / clients.num_prompt_tokens,
        **told("ttft", clients.ttft),
        **told("e2e", clients.e2e),
        "busiest_share": max(clients.num_sent.values(), default=0) / max(1, len(clients.e2e)),
        "seconds": seconds,
        "num_failed": clients.num_failed,
    }


def told(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and 99th percentile."""
    p50, p99 = np.percentile(seconds, (50, 99))
    return {
        f"{name}_mean": float(np.mean(seconds)),
        f"{name}_p50": float(p50),
        f"{name}_p99": float(p99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare routers of Ray Serve.")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--limit", type=int, default=1200, help="requests of the trace")
    parser.add_argument("--time-scale", type=float, default=0.5)
    args = parser.parse_args()
    source = WorkloadSource(
        path=args.workload, limit=args.limit, min_turns=2, time_scale=args.time_scale
    )
    workload, _ = source.load(0).clipped(SETTINGS["model.max_model_len"])
    # Ray's processes import the router from here.
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    ray.init(
        num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=200 * 2**20
    )
    serve.start(http_options={"host": "127.0.0.1", "port": 0, "location": "NoServer"})
    print(f"{len(workload.requests)} requests, the last comes after {workload.duration:.0f} s")
    found = {}
    try:
        for name, router in ROUTERS.items():
            found[name] = asyncio.run(measure(router, workload))
            row = found[name]
            print(
                f"{name:18}: {100 * row['hit_rate']:.1f}% of prompt tokens cached, TTFT p50 "
                f"{row['ttft_p50']:.2f} s, p99 {row['ttft_p99']:.2f} s, {row['seconds']:.0f} s in "
                f"all, {row['num_failed']} failed"
            )
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
