"""What fits into memory: requests with sliding windows, and which request is preempted.

    python benchmarks/memory.py windows gpt_oss|gemma3_text [--gib 0.5] [--tokens 2048]
    python benchmarks/memory.py victims [--seeds 5]

`windows`: how many requests run at once in the same memory, with and without blocks for sliding
windows. Random weights with the layers and the K and V of gpt-oss-20b and of Gemma 3 1B, and small
products. Without: `num_window_blocks` 0, with which all layers keep all blocks.

`victims`: tokens computed again and p99 by which request is preempted, where layers have states.
Requests come faster than KV blocks last, so that running ones are preempted; what such a request
computes again is what lies behind its newest snapshot, if its blocks are still there. Each value of
`--victim` serves the same requests on the virtual clock. Printed are medians of the seeds and, in
brackets, of the ratios to the policy's own victim, the last in its order. The last line is JSON.
"""

import asyncio
import math
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from harness import MODELS, ROOT, Args, Opt, Program, Table, ratio

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, SchedulerConfig
from aioserve.lab.reproduce.claims.claim import configure, make_workload, measure
from aioserve.outputs import SchedulerStats

sys.path.append(str(ROOT))
from tests.models import make_model

program = Program(__doc__)

SHAPES = MODELS["windows"]
REPLY, NUM_REQUESTS = 96, 12  # tokens of a reply, requests at once


def stats_of(engine: AsyncEngine) -> SchedulerStats:
    """Return the statistics of the scheduler as they are now."""
    stats = engine.get_stats()
    assert stats is not None
    return stats


async def run_windows(model: Path, cache: CacheConfig, num_tokens: int) -> dict[str, Any]:
    """What the pools hold, and how many of the requests ran at once."""
    config = EngineConfig(
        model=ModelConfig(
            model=str(model), dtype="bfloat16", max_model_len=8192, skip_tokenizer_init=True
        ),
        cache=cache,
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
    )
    random.seed(0)
    params = SamplingParams(max_tokens=REPLY, ignore_eos=True, detokenize=False)
    most = 0
    async with AsyncEngine(config) as engine:

        async def generate() -> None:
            nonlocal most
            prompt = [random.randrange(3, 500) for _ in range(num_tokens - REPLY)]
            async for _ in engine.generate(prompt, params):
                most = max(most, stats_of(engine).num_running_reqs)

        await asyncio.gather(*(generate() for _ in range(NUM_REQUESTS)))
        stats = stats_of(engine)
    return {
        "tokens": stats.num_kv_blocks * cache.block_size,
        "window_blocks": stats.num_window_blocks,
        "at_once": most,
        "preemptions": stats.num_preemptions,
    }


@program.command(
    "windows",
    {"shape": Opt(str, choices=SHAPES)},
    gib=0.5,
    tokens=Opt(2048, "of a request"),
)
def windows(args: Args) -> dict[str, Any]:
    """Requests at once, with blocks for sliding windows and without."""
    counts = {"tokens": "10", "window_blocks": "15", "at_once": "9", "preemptions": "13"}
    table = Table({"blocks": "<24", **counts})
    with tempfile.TemporaryDirectory() as folder:
        shape = {"max_position_embeddings": 8192, **SHAPES[args.shape]}
        model = make_model(args.shape, Path(folder), **shape)
        for name, cache in {
            "of windows": CacheConfig(kv_cache_gib=args.gib),
            "of all layers": CacheConfig(kv_cache_gib=args.gib, num_window_blocks=0),
        }.items():
            found = asyncio.run(run_windows(model, cache, args.tokens))
            table.add({"blocks": name, **found})
    return {"rows": table.rows}


# Victims.


BLOCKS, SLOTS = 500, 96  # of 16 tokens; for states
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
Found = dict[str, float]


def simulated(victim: str, seed: int) -> Found:
    """One run on the virtual clock."""
    config = configure(
        "chunked_prefill",
        STEPS,
        scheduler__victim=victim,
        scheduler__max_num_seqs=32,
        cache__num_kv_blocks=BLOCKS,
        cache__num_state_slots=SLOTS,
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


def show(title: str, runs: dict[str, list[Found]]) -> None:
    """Medians, and in brackets the median ratio to the policy's own victim."""
    names = list(runs["policy"][0])
    table = Table({"victim": "<16", **dict.fromkeys(names, "20")}, title)
    for victim, found in runs.items():
        cells = {}
        for name in names:
            own, base = ([run[name] for run in them] for them in (found, runs["policy"]))
            share = ratio(own, base)
            beside = "" if math.isnan(share) else f" ({share:.2f})"
            cells[name] = f"{statistics.median(own):,.1f}{beside}"
        table.add({"victim": victim, **cells})


@program.command("victims", seeds=5)
def victims(args: Args) -> dict[str, Any]:
    """Which request is preempted, on the virtual clock."""
    found = {v: [simulated(v, seed) for seed in range(args.seeds)] for v in VICTIMS}
    show(f"virtual clock, {BLOCKS} blocks, {SLOTS} slots", found)
    return {"virtual": found}


if __name__ == "__main__":
    program.main()
