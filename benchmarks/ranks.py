"""Two ranks of one thread against one rank of two: the same work in turn, on one engine each.

    python benchmarks/ranks.py [--rounds 20]

The model is SmolLM2-135M with 4 KV heads for 3 and 8 heads for 9, as 3 cannot be shared by two.
Times of all processes are counted; the last line is JSON.
"""

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import psutil
from make_model import SHAPES, model_path

from aioserve import AsyncEngine, SamplingParams
from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig

SHAPE = {**SHAPES["135m"], "num_attention_heads": 8, "num_key_value_heads": 4}
SHAPES["135m-4kv"] = SHAPE
# Streams, tokens of each prompt, tokens of each reply.
LOADS = {"decode 1": (1, 1, 8), "decode 16": (16, 1, 8), "prompt of 512": (1, 512, 1)}


def make_engine(num_ranks: int, dtype: Any) -> AsyncEngine:
    return AsyncEngine(
        EngineConfig(
            model=ModelConfig(
                model=str(model_path("135m-4kv")), dtype=dtype, skip_tokenizer_init=True
            ),
            cache=CacheConfig(num_kv_blocks=512, enable_prefix_caching=False),
            runner=RunnerConfig(tensor_parallel_size=num_ranks, threads=2),
        )
    )


def cpu_seconds() -> float:
    """Of this process and its children."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children())]
    return float(sum(each.user + each.system for each in times))


async def measure(engine: AsyncEngine, streams: int, prompt: int, reply: int) -> tuple[float, ...]:
    """Seconds on the clock, and of CPU."""

    async def one(number: int) -> None:
        ids = [(number + 7 * place) % 40_000 + 16 for place in range(prompt)]
        params = SamplingParams(temperature=0, max_tokens=reply, ignore_eos=True, detokenize=False)
        async for _ in engine.generate(ids, params):
            pass

    wall, cpu = time.perf_counter(), cpu_seconds()
    await asyncio.gather(*map(one, range(streams)))
    return time.perf_counter() - wall, cpu_seconds() - cpu


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    found = {}
    async with make_engine(1, args.dtype) as one, make_engine(2, args.dtype) as two:
        for name, load in LOADS.items():
            seconds: dict[int, list[tuple[float, ...]]] = {1: [], 2: []}
            for _ in range(args.rounds + 1):
                for ranks, engine in ((1, one), (2, two)):
                    seconds[ranks].append(await measure(engine, *load))
            row: dict[str, float] = {}
            for kind, place in (("wall", 0), ("cpu", 1)):
                least = {n: min(pair[place] for pair in own[1:]) for n, own in seconds.items()}
                ratios = [b[place] / a[place] for a, b in zip(*seconds.values(), strict=True)][1:]
                row |= {f"{kind}_ms_{n}": 1e3 * value for n, value in least.items()}
                row |= {f"{kind}_ratio": least[2] / least[1]}
                row |= {f"{kind}_median_ratio": statistics.median(ratios)}
            found[name] = {key: round(value, 3) for key, value in row.items()}
            print(name, found[name], flush=True)
    itemsize = 4 if args.dtype == "float32" else 2
    print(
        json.dumps(
            {
                "dtype": args.dtype,
                "sums_per_step": 2 * SHAPE["num_hidden_layers"],
                "bytes_per_sum_and_token": SHAPE["hidden_size"] * itemsize,
                "loads": found,
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main())
