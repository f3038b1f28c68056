"""What a shadow policy costs the live server: the same load with one and without, in turns.

    python benchmarks/shadow.py [--policy hrrn] [--clients 16] [--seconds 8] [--rounds 3]
        [--model DIR] [--simulated]

So many clients in a closed loop, prompts of 200 tokens, replies of 100, on the embedded model. The
shadow follows five seconds behind, so measuring begins after that. Printed: output tokens per
second and gaps between tokens with and without, the share of the event loop's time that the shadow
took (bounded by --shadow-max-share), and what a shadowed step cost. The last line is JSON.
"""

import argparse
import asyncio
import json
import statistics
from typing import Any

import numpy as np

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.lab.shadow import LAG_SECONDS

PROMPT_TOKENS, OUTPUT_TOKENS = 200, 100


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.num_tokens = 0
        self.gaps: list[float] = []
        self.is_measuring = False

    async def client(self, number: int) -> None:
        rng, clock = np.random.default_rng(number), asyncio.get_running_loop().time
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0)
        while True:
            prompt = rng.integers(16, self.engine.model_info.vocab_size, PROMPT_TOKENS).tolist()
            last = None
            async for output in self.engine.generate(prompt, params):
                now = clock()
                if self.is_measuring:
                    self.num_tokens += len(output.token_ids)
                    if last is not None:
                        self.gaps.append(now - last)
                last = now


async def run(config: EngineConfig, num_clients: int, seconds: float) -> dict[str, float]:
    """One engine's life: warm up, measure, close."""
    async with AsyncEngine(config) as engine:
        load = Load(engine)
        clients = [asyncio.create_task(load.client(i)) for i in range(num_clients)]
        await asyncio.sleep(LAG_SECONDS + 1)
        followed = engine.metrics.shadow.shadow
        shadow = None if followed is None else followed.stats
        before = (0.0, 0) if shadow is None else (shadow.cost_seconds, shadow.num_steps)
        load.is_measuring = True
        await asyncio.sleep(seconds)
        load.is_measuring = False
        result = {
            "tokens_per_second": load.num_tokens / seconds,
            "gap_p50_ms": 1e3 * float(np.quantile(load.gaps, 0.5)),
            "gap_p99_ms": 1e3 * float(np.quantile(load.gaps, 0.99)),
        }
        if shadow is not None:
            cost, steps = shadow.cost_seconds - before[0], shadow.num_steps - before[1]
            result["share"] = cost / seconds
            result["us_per_step"] = 1e6 * cost / max(steps, 1)
            result["resets"] = shadow.num_resets
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description="What a shadow policy costs the live server.")
    parser.add_argument("--policy", default="hrrn")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", help="model directory (default: the embedded model)")
    parser.add_argument("--simulated", action="store_true", help="no model, modelled step times")
    args = parser.parse_args()
    settings: list[tuple[str, Any]] = [] if args.model is None else [("model.model", args.model)]
    if args.simulated:
        settings.append(("runner.runner", "simulated"))
    configs = {
        "without": EngineConfig.load(None, settings),
        "with": EngineConfig.load(None, [*settings, ("shadow.shadow_policy", args.policy)]),
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in configs}
    for _ in range(args.rounds):
        for name, config in configs.items():
            results[name].append(asyncio.run(run(config, args.clients, args.seconds)))
            numbers = results[name][-1].items()
            print(f"{name:8}", "  ".join(f"{k} {v:.4g}" for k, v in numbers), flush=True)
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in results.items()
    }
    ratios = {
        key: statistics.median(
            b[key] / a[key] for a, b in zip(results["without"], results["with"], strict=True)
        )
        for key in medians["without"]
    }
    print("with / without:", "  ".join(f"{k} {v:.3f}" for k, v in ratios.items()))
    print(json.dumps({"clients": args.clients, "medians": medians, "ratios": ratios}))


if __name__ == "__main__":
    main()
