"""Tokens computed again and p99 by which request is preempted, where layers have states.

    python benchmarks/victims.py [--seeds 5] [--slots 96] [--live]

Requests come faster than KV blocks last, so that running ones are preempted; what such a request
computes again is what lies behind its newest snapshot, if its blocks are still there. Each value of
`--victim` serves the same requests: on the virtual clock, and with `--live` by the engine with a
tiny Qwen3.5 of random weights, all at once. Printed are medians of the seeds and, in brackets, of
the ratios to the policy's own victim, the last in its order. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.engine.builder import make_runner
from aioserve.lab.reproduce.claims.simulate import configure, make_workload, measure
from aioserve.lab.simulation.outcome import DelegatingRunner
from aioserve.model_source.info import ModelInfo
from aioserve.outputs import ModelRunnerOutput
from aioserve.scheduler import SchedulerOutput

VICTIMS = ("policy", "least_computed", "least_lost")
STEPS = {"step_base_ms": 4.0, "step_prefill_token_us": 50.0, "step_decode_us": 100.0}
SPEC = {
    "arrivals": {"kind": "poisson", "rate": 6.0},
    "num_requests": 200,
    "classes": [
        {
            "name": "chat",
            "prompt": {"kind": "lognormal", "median": 300, "sigma": 1.0, "max": 2000},
            "output": {"kind": "lognormal", "median": 150, "sigma": 1.0, "max": 1000},
        }
    ],
}
LIVE_REQUESTS = 48
Found = dict[str, float]


def simulated(victim: str, seed: int, args: argparse.Namespace) -> Found:
    """One run on the virtual clock."""
    config = configure(
        "chunked_prefill",
        STEPS,
        scheduler__victim=victim,
        scheduler__max_num_seqs=32,
        cache__num_kv_blocks=args.blocks,
        cache__num_state_slots=args.slots,
        model__max_model_len=4096,
    )
    run = measure(config, make_workload(SPEC, seed, "chat"))
    return {
        "preemptions": run.totals["preemptions"],
        "tokens again": run.totals["wasted_tokens"],
        "ttft p99 ms": 1e3 * float(np.nanpercentile(run.ttft, 99)),
        "e2e p99 ms": 1e3 * float(np.nanpercentile(run.e2e, 99)),
        "seconds": run.totals["seconds"],
    }


class TokenCounter(DelegatingRunner):
    """Counts the tokens of all steps, and the preemptions."""

    num_tokens = num_preemptions = 0

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> "asyncio.Future[ModelRunnerOutput]":
        self.num_tokens += scheduler_output.total_num_scheduled_tokens
        self.num_preemptions += len(scheduler_output.preempted_req_ids)
        return super().execute_model(scheduler_output)


async def live(victim: str, seed: int, model: Path, args: argparse.Namespace) -> Found:
    """One run of the engine with the model, all requests at once."""
    config = EngineConfig.load(
        None,
        [
            ("model.model", str(model)),
            ("model.dtype", "float32"),
            ("model.skip_tokenizer_init", True),
            ("scheduler.policy", "chunked_prefill"),
            ("scheduler.victim", victim),
            ("scheduler.max_num_seqs", 16),
            ("cache.num_kv_blocks", args.live_blocks),
            ("cache.num_state_slots", args.slots // 2),
        ],
    )
    rng = random.Random(seed)
    sizes = [(rng.randrange(16, 192), rng.randrange(16, 192)) for _ in range(LIVE_REQUESTS)]
    prompts = [[rng.randrange(3, 90) for _ in range(size)] for size, _ in sizes]
    runner = TokenCounter(make_runner(config, ModelInfo(config.model)))
    firsts: list[float] = []
    ends: list[float] = []

    async with AsyncEngine(config, runner=runner) as engine:
        began = time.perf_counter()

        async def one(prompt: list[int], reply: int) -> None:
            params = SamplingParams(max_tokens=reply, ignore_eos=True, detokenize=False)
            is_first = True
            async for _ in engine.generate(prompt, params):
                if is_first:
                    firsts.append(time.perf_counter() - began)
                    is_first = False
            ends.append(time.perf_counter() - began)

        await asyncio.gather(
            *(one(prompt, reply) for prompt, (_, reply) in zip(prompts, sizes, strict=True))
        )
        seconds = time.perf_counter() - began
    needed = sum(prompt + reply - 1 for prompt, reply in sizes)
    return {
        "preemptions": runner.num_preemptions,
        "tokens again": runner.num_tokens - needed,
        "ttft p99 ms": 1e3 * float(np.percentile(firsts, 99)),
        "e2e p99 ms": 1e3 * float(np.percentile(ends, 99)),
        "seconds": seconds,
    }


def table(title: str, runs: dict[str, list[Found]]) -> None:
    """Medians, and in brackets the median ratio to the policy's own victim."""
    names = list(runs["policy"][0])
    print(f"{title}\n{'victim':16}" + "".join(f"{name:>20}" for name in names))
    for victim, found in runs.items():
        cells = []
        for name in names:
            ratios = [
                run[name] / base[name]
                for run, base in zip(found, runs["policy"], strict=True)
                if base[name]
            ]
            ratio = f" ({statistics.median(ratios):.2f})" if ratios else ""
            cells.append(f"{statistics.median(run[name] for run in found):,.1f}{ratio}")
        print(f"{victim:16}" + "".join(f"{cell:>20}" for cell in cells))


def main() -> None:
    """On the virtual clock, then live."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=96, help="for states; live, half of them")
    parser.add_argument("--blocks", type=int, default=500, help="of 16 tokens; simulated")
    parser.add_argument("--live-blocks", type=int, default=100)
    parser.add_argument("--live", action="store_true")
    args = parser.parse_args()
    found = {v: [simulated(v, seed, args) for seed in range(args.seeds)] for v in VICTIMS}
    table(f"virtual clock, {args.blocks} blocks, {args.slots} slots", found)
    result: dict[str, Any] = {"virtual": found}
    if args.live:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from tests.models import make_model

        with tempfile.TemporaryDirectory() as folder:
            model = make_model("qwen3_5_text", Path(folder))
            runs: dict[str, list[Found]] = {victim: [] for victim in VICTIMS}
            for seed in range(args.seeds):
                for victim in VICTIMS:  # by turns
                    runs[victim].append(asyncio.run(live(victim, seed, model, args)))
        table(f"\nlive, {args.live_blocks} blocks, {args.slots // 2} slots", runs)
        result["live"] = runs
    print(json.dumps(result))


if __name__ == "__main__":
    main()
