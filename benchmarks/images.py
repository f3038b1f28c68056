"""How long streams wait beside a request with a large image, by how much of it a step encodes.

    python benchmarks/images.py                       # 1,024 tokens of an image
    python benchmarks/images.py --side 1792 --chunk 0 256 64

A tiny Qwen2.5-VL with random weights and a larger encoder. Streams decode; then a request with an
image comes. The engines take turns. The largest gap between two tokens of a stream, from then until
the request has its first token, and when that comes. The last line is JSON.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from aioserve import AsyncEngine, EngineConfig, MultimodalPrompt, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig

sys.path.append(str(Path(__file__).parents[1]))
from tests.seeing_models import make_seeing_model, picture

PATCH, MERGED = 14, 2


def make_model(path: Path, args: argparse.Namespace) -> Path:
    vision = {
        "depth": args.layers,
        "hidden_size": args.hidden,
        "intermediate_size": 4 * args.hidden,
        "num_heads": args.hidden // 64,
        "patch_size": PATCH,
        "window_size": 8 * PATCH,
        "fullatt_block_indexes": [args.layers // 2 - 1, args.layers - 1],
        "initializer_range": 0.02,
    }
    most = {"shortest_edge": 56 * 56, "longest_edge": args.side * args.side}
    processing = {"patch_size": PATCH, "size": most}
    return make_seeing_model("qwen2_5_vl", path, vision, processing, max_position_embeddings=32_768)


def make_config(path: Path, chunk: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(path), max_model_len=20_000),
        cache=CacheConfig(num_kv_blocks=4_000),
        runner=RunnerConfig(),
        scheduler=SchedulerConfig(encoder_chunk_tokens=chunk),
    )


async def measure(engine: AsyncEngine, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Seconds: the largest gap of a stream, and the first token of the request with the image."""
    times: list[list[float]] = [[] for _ in range(args.streams)]
    params = SamplingParams(max_tokens=15_000, temperature=0, ignore_eos=True)

    async def stream(own: list[float]) -> None:
        async for _ in engine.generate("What news, my lord?", params):
            own.append(time.perf_counter())

    tasks = [asyncio.create_task(stream(own)) for own in times]
    await asyncio.sleep(1.0)
    begin = time.perf_counter()
    prompt = MultimodalPrompt(
        f"{engine.image_placeholder} What is this?", [picture(seed, args.side, args.side)]
    )
    async for output in engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0)):
        num_tokens = output.num_prompt_tokens
    end = time.perf_counter()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    gaps = [
        after - before
        for own in times
        for before, after in itertools.pairwise(own)
        if after > begin and before < end
    ]
    return {"gap": max(gaps), "ttft": end - begin, "prompt_tokens": num_tokens}


async def run(args: argparse.Namespace) -> dict[int, list[dict[str, float]]]:
    found: dict[int, list[dict[str, float]]] = {chunk: [] for chunk in args.chunk}
    with tempfile.TemporaryDirectory() as folder:
        path = make_model(Path(folder), args)
        for number in range(args.rounds):
            for chunk in args.chunk:
                async with AsyncEngine(make_config(path, chunk)) as engine:
                    found[chunk].append(await measure(engine, args, number))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--side", type=int, default=896, help="pixels of the square image")
    parser.add_argument("--layers", type=int, default=16, help="of the encoder")
    parser.add_argument("--hidden", type=int, default=512, help="size of the encoder")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--chunk", type=int, nargs="+", default=[0, 256, 64])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found = asyncio.run(run(args))
    print(f"{'encoder_chunk_tokens':>20} {'largest gap, s':>15} {'first token, s':>15}")
    rows: list[dict[str, Any]] = []
    for chunk, measured in found.items():
        gap, ttft = (statistics.median(one[name] for one in measured) for name in ("gap", "ttft"))
        print(f"{chunk or 'no limit':>20} {gap:15.2f} {ttft:15.2f}")
        rows.append({"chunk": chunk, "measured": measured})
    print(json.dumps({"load": os.getloadavg(), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
