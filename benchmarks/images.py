"""How long streams wait beside a request with a large image, by how much of it a step encodes.

    python benchmarks/images.py                       # 1,024 tokens of an image
    python benchmarks/images.py --side 1792 --chunk 0 256 64
    python benchmarks/images.py --gemma3              # prompts of images beside prompts of text

A tiny Qwen2.5-VL with random weights and a larger encoder. Streams decode; then a request with an
image comes. The engines take turns. The largest gap between two tokens of a stream, from then until
the request has its first token, and when that comes. The last line is JSON.

`--gemma3`: the prefill of a prompt of images whose tokens see each other, beside that of a text of
as many tokens, which take turns: a Gemma 3 with random weights, and with the heads of the 4B model
in fewer and narrower layers. The encoder knows the images. Processor time of one thread.
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


def make_gemma3(path: Path) -> Path:
    """Heads, windows and tokens of an image as of gemma-3-4b."""
    vision = {"image_size": 128}  # 16 x 16 patches, of which 256 tokens are made
    processing = {"size": {"height": 128, "width": 128}, "image_seq_length": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    make_seeing_model(
        "gemma3",
        path,
        vision,
        processing,
        hidden_size=640,
        intermediate_size=2560,
        num_hidden_layers=len(layers),
        layer_types=layers,
        sliding_window=1024,
        query_pre_attn_scalar=256,
        max_position_embeddings=32_768,
        **heads,
    )
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"mm_tokens_per_image": 256}))
    return path


async def compare_first_tokens(args: argparse.Namespace) -> dict[str, Any]:
    """Processor seconds to the first token of prompts of images and of text, in turns."""
    found: dict[str, list[float]] = {"images": [], "text": []}
    num_tokens = 0

    async def first_token(prompt: MultimodalPrompt | list[int]) -> float:
        nonlocal num_tokens
        begin = time.process_time()
        async for output in engine.generate(prompt, SamplingParams(max_tokens=1, temperature=0)):
            num_tokens = output.num_prompt_tokens
        return time.process_time() - begin

    with tempfile.TemporaryDirectory() as folder:
        path = make_gemma3(Path(folder))
        config = EngineConfig(
            model=ModelConfig(model=str(path), dtype=args.dtype, max_model_len=4_000),
            cache=CacheConfig(num_kv_blocks=1_000, enable_prefix_caching=False),
            runner=RunnerConfig(threads=1),
        )
        async with AsyncEngine(config) as engine:
            images = [picture(number, 128, 128) for number in range(args.images)]
            marks = engine.image_placeholder * len(images)
            seen = MultimodalPrompt(f"What are these? {marks}", images)
            await first_token(seen)  # the encoder runs this once
            text = [number % 1_000 for number in range(num_tokens)]
            for _ in range(args.rounds):
                found["images"].append(await first_token(seen))
                found["text"].append(await first_token(text))
    return {"prompt_tokens": num_tokens, **found}


def print_first_tokens(args: argparse.Namespace) -> None:
    measured = asyncio.run(compare_first_tokens(args))
    best = {name: min(measured[name]) for name in ("images", "text")}
    for name, seconds in best.items():
        print(f"{measured['prompt_tokens']:,} tokens of {name:6}: {seconds * 1e3:7.1f} ms, at best")
    pairs = zip(measured["images"], measured["text"], strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    print(f"images to text: {best['images'] / best['text']:.2f}; median of pairs {ratio:.2f}")
    print(json.dumps({"load": os.getloadavg(), **measured}))


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
    parser.add_argument("--gemma3", action="store_true", help="images beside text")
    parser.add_argument("--images", type=int, default=4, help="of a prompt, with --gemma3")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    args = parser.parse_args()
    if args.gemma3:
        print_first_tokens(args)
        return 0
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
