"""What images cost: streams that wait while one is encoded, prompts of images, an encoder's layers.

    python benchmarks/images.py streams                # 1,024 tokens of an image
    python benchmarks/images.py streams --side 1792 --chunk 0 256 64
    python benchmarks/images.py prompts                # of images, beside prompts of text
    python benchmarks/images.py encoder [--side 1792] [--dtype float32]

`streams`: a tiny Qwen2.5-VL with random weights and a larger encoder. Streams decode; then a
request with an image comes. Engines with different limits of image tokens per step take
turns. The largest gap between two tokens of a stream, from then until the request has its first
token, and when that comes.

`prompts`: the prefill of a prompt of images whose tokens see each other, beside that of a text of
as many tokens, in turns: a Gemma 3 with random weights, and with the heads of the 4B model in fewer
and narrower layers. The encoder knows the images. Processor time of one thread.

`encoder`: the layers of a Qwen2.5-VL encoder with random weights, whose last layer sees the whole
image and the others windows, with the attention of torch and of the compiled kernels. Processor
time of one thread, in turns; the least of each. The floor is what the products of a layer take at
the speed of one large product. The last line is JSON.
"""

import asyncio
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import ROOT, Args, Opt, Program, Table, medians, ratio, samples, turns

from aioserve import AsyncEngine, EngineConfig, MultimodalPrompt, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.features.multimodal.cpu_encoder_attention import NAME
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.bridge import ATTN_IMPLEMENTATION

sys.path.append(str(ROOT))
from tests.seeing_models import make_seeing_model, picture

PATCH, MERGED, WINDOW = 14, 2, 8  # the last in patches of a side
NUM_STREAMS, HIDDEN = 4, 1280  # beside an image; the size of the encoder alone

program = Program(__doc__)
DTYPE = Opt("bfloat16", choices=("float32", "bfloat16", "float16"))
SIDE = Opt(896, "pixels of the square image")


def make_qwen(path: Path, side: int, layers: int, hidden: int, head: int, whole: list[int]) -> Path:
    """A model whose encoder is as large as asked for; layers `whole` see the whole image."""
    vision = {
        "depth": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_heads": hidden // head,
        "patch_size": PATCH,
        "window_size": WINDOW * PATCH,
        "fullatt_block_indexes": whole,
        "initializer_range": 0.02,
    }
    most = {"shortest_edge": 56 * 56, "longest_edge": side * side}
    processing = {"patch_size": PATCH, "size": most}
    return make_seeing_model("qwen2_5_vl", path, vision, processing, max_position_embeddings=32_768)


# Streams beside an image.


async def measure(engine: AsyncEngine, args: Args, seed: int) -> dict[str, float]:
    """Seconds: the largest gap of a stream, and the first token of the request with the image."""
    times: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
    params = SamplingParams(max_tokens=15_000, temperature=0, ignore_eos=True)

    async def stream(own: list[float]) -> None:
        async for _ in engine.generate("What news, my lord?", params):
            own.append(time.perf_counter())

    tasks = [asyncio.create_task(stream(own)) for own in times]
    await asyncio.sleep(1.0)
    begin = time.perf_counter()
    prompt = MultimodalPrompt(
        f"{engine.media.image_placeholder} What is this?", [picture(seed, args.side, args.side)]
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


@program.command(
    "streams",
    side=SIDE,
    chunk=Opt([0, 256, 64], "tokens of an image in a step; 0: no limit"),
    rounds=3,
)
async def streams(args: Args) -> dict[str, Any]:
    """How long streams wait beside a request with a large image."""
    found: dict[int, list[dict[str, float]]] = {chunk: [] for chunk in args.chunk}
    with tempfile.TemporaryDirectory() as folder:
        path = make_qwen(Path(folder), args.side, 16, 512, 64, [7, 15])
        for number, chunk in turns(args.chunk, args.rounds):
            config = EngineConfig(
                model=ModelConfig(model=str(path), max_model_len=20_000),
                cache=CacheConfig(num_kv_blocks=4_000),
                scheduler=SchedulerConfig(encoder_chunk_tokens=chunk),
            )
            async with AsyncEngine(config) as engine:
                found[chunk].append(await measure(engine, args, number))
    columns = {"largest gap, s": "16.2f", "first token, s": "16.2f"}
    table = Table({"encoder_chunk_tokens": "20", **columns})
    for chunk, measured in found.items():
        row = medians(measured)
        row |= {"largest gap, s": row.pop("gap"), "first token, s": row.pop("ttft")}
        told = {"encoder_chunk_tokens": chunk or "no limit", **row}
        table.add({**told, "measured": measured})
    return {"rows": table.rows}


# Prompts of images.


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


@program.command("prompts", rounds=3)
async def prompts(args: Args) -> dict[str, Any]:
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
            model=ModelConfig(model=str(path), dtype="bfloat16", max_model_len=4_000),
            cache=CacheConfig(num_kv_blocks=1_000, enable_prefix_caching=False),
            runner=RunnerConfig(threads=1),
        )
        async with AsyncEngine(config) as engine:
            images = [picture(number, 128, 128) for number in range(4)]
            marks = engine.media.image_placeholder * len(images)
            seen = MultimodalPrompt(f"What are these? {marks}", images)
            await first_token(seen)  # the encoder runs this once
            text = [number % 1_000 for number in range(num_tokens)]
            for _ in range(args.rounds):
                found["images"].append(await first_token(seen))
                found["text"].append(await first_token(text))
    best = {name: min(seconds) for name, seconds in found.items()}
    for name, seconds in best.items():
        print(f"{num_tokens:,} tokens of {name:6}: {seconds * 1e3:7.1f} ms, at best")
    pairs = ratio(found["images"], found["text"])
    print(f"images to text: {best['images'] / best['text']:.2f}; median of pairs {pairs:.2f}")
    return {"prompt_tokens": num_tokens, **found}


# The encoder alone.


def measure_layers(whole: Any, args: Args, dtype: torch.dtype) -> dict[str, list[float]]:
    """Seconds of each layer, the least of all rounds, by what attends."""
    visual, side = whole.model.visual, args.side // PATCH
    pixels = torch.randn(side * side, 3 * 2 * PATCH * PATCH, dtype=dtype)
    grid = torch.tensor([[1, side, side]])
    begun: list[float] = []
    for block in visual.blocks:
        block.register_forward_pre_hook(lambda *_: begun.append(time.process_time()))
    found: dict[str, list[float]] = {}
    for _, name in turns((NAME, "sdpa"), args.rounds):
        visual.set_attn_implementation(name)
        begun.clear()
        whole.get_image_features(pixel_values=pixels, image_grid_thw=grid)
        ends = [*begun[1:], time.process_time()]
        own = [end - begin for begin, end in zip(begun, ends, strict=True)]
        found[name] = list(map(min, own, found.get(name, own)))
    return found


def floors(whole: Any, args: Args, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of the products of a layer with windows and of one without."""
    x, weight = (torch.randn(2048, HIDDEN, dtype=dtype) for _ in range(2))
    speed = (
        2
        * 2048
        * weight.numel()
        / min(samples(lambda: F.linear(x, weight), 9, clock=time.process_time))
    )
    num_patches = (args.side // PATCH) ** 2
    block = whole.model.visual.blocks[0]
    linears = [part for part in block.modules() if isinstance(part, torch.nn.Linear)]
    products = 2 * num_patches * sum(linear.weight.numel() for linear in linears)
    windows, full = (4 * num_patches * seen * HIDDEN for seen in (WINDOW**2, num_patches))
    return (products + windows) / speed, (products + full) / speed


@program.command(
    "encoder",
    side=SIDE,
    dtype=DTYPE,
    rounds=3,
)
@torch.inference_mode()
def encoder(args: Args) -> dict[str, Any]:
    """An encoder's layers, with the attention of torch and of the compiled kernels."""
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = make_qwen(Path(folder), args.side, 2, HIDDEN, 80, [1])
        info = ModelInfo(ModelConfig(model=str(path)))
        whole = info.source.load_seeing_module(dtype, torch.device("cpu"), ATTN_IMPLEMENTATION)
    found, least = measure_layers(whole, args, dtype), floors(whole, args, dtype)
    title = f"{(args.side // PATCH // MERGED) ** 2:,} tokens of an image, {args.dtype}"
    table = Table({"s of a layer": "14", "with windows": "14.2f", "without": "10.2f"}, title)
    for name, layers in (("kernels", found[NAME]), ("torch", found["sdpa"])):
        row = {"with windows": min(layers[:-1]), "without": layers[-1]}
        table.add({"s of a layer": name, **row, "layers": layers})
    table.add({"s of a layer": "floor", "with windows": least[0], "without": least[1]})
    return {"rows": table.rows}


if __name__ == "__main__":
    program.main()
