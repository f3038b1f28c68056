"""How well a model predicts a text, by the type of its weights.

    python benchmarks/perplexity.py TEXT
    python benchmarks/perplexity.py TEXT --model smollm2 --types bfloat16,int8,int4,Q4_1
    python benchmarks/perplexity.py TEXT --model smollm2 --kv-cache    # auto and int8

Weights are rounded to a type and unpacked again, and `transformers` computes in float32: measured
are types, not kernels. `int4/64` is int4 in groups of 64 inputs. `stored` is what the model has on
disk; a file shows a type that nobody here writes (Q4_K, Q5_K, Q6_K). With `--kv-cache` weights stay
as they are and our own engine reads the windows, by `prompt_logprobs`, with each type of K and V.
The last line is JSON.
"""

import argparse
import asyncio
import math
from pathlib import Path
from typing import Any

import gguf
import msgspec
import torch
from torch import Tensor, nn

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import EMBEDDED_MODEL, CacheConfig, ModelConfig
from aioserve.model_info import ModelInfo
from aioserve.model_source.quantized import quantize

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
TYPES = ("stored", "bfloat16", "int8", "int4", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


def rounded(weight: Tensor, kind: str, is_inner: bool) -> Tensor:
    """A matrix in float32 as it comes back from a type; the outer ones are embedding and head."""
    if kind in HALF:
        return weight.to(HALF[kind]).float()
    bits, _, group = kind.partition("/")
    if bits in ("int8", "int4"):
        bits = bits if is_inner else "int8"
        return quantize(weight, f"{bits}/{group or 32}").dequantize(torch.float32)
    number = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), number), number))


@torch.inference_mode()
def perplexity(module: Any, windows: Tensor) -> float:
    """Of all tokens of `windows` [N, length] but the first of each."""
    loss = 0.0
    for window in windows:
        logits = module(window[None], use_cache=False).logits[0, :-1]
        loss += float(nn.functional.cross_entropy(logits.float(), window[1:], reduction="sum"))
    return math.exp(loss / (windows.numel() - len(windows)))


async def served_perplexity(args: argparse.Namespace, windows: Tensor, kind: Any) -> float:
    """The same of our engine, with K and V of a type."""
    config = EngineConfig(
        model=ModelConfig(model=args.model, dtype=args.dtype),
        cache=CacheConfig(kv_cache_dtype=kind, enable_prefix_caching=False),
    )
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    loss = 0.0
    async with AsyncEngine(config) as engine:
        for window in windows.tolist():
            async for output in engine.generate(window, params):
                loss -= sum(entry.logprob for entry in output.prompt_logprobs or () if entry)
    return math.exp(loss / (windows.numel() - len(windows)))


def main() -> None:
    """Print a row per type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--types", default=",".join(TYPES), help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=8192, help="of the end of the text")
    parser.add_argument("--length", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--kv-cache", action="store_true", help="types of K and V, not of weights")
    parser.add_argument("--dtype", default="auto", help="to compute in, with --kv-cache")
    args = parser.parse_args()
    info = ModelInfo(ModelConfig(model=args.model))
    ids = info.tokenizer(args.text.read_text(encoding="utf-8"))["input_ids"][-args.tokens :]
    windows = torch.tensor(ids[: len(ids) // args.length * args.length]).view(-1, args.length)
    found = {}
    if args.kv_cache:
        for kind in ("auto", "int8"):
            found[kind] = asyncio.run(served_perplexity(args, windows, kind))
            print(f"{kind:10} {found[kind]:10.3f} {found[kind] / found['auto'] - 1:+10.2%}")
        print(msgspec.json.encode({"model": args.model, "kv_cache": found}).decode())
        return
    module = info.source.load_module(torch.float32, torch.device("cpu"), "sdpa")
    inner = {id(part.weight) for part in module.modules() if type(part) is nn.Linear}
    inner -= {id(module.get_input_embeddings().weight), id(module.get_output_embeddings().weight)}
    matrices = [p for p in module.parameters() if p.ndim == 2 and p.shape[1] % 32 == 0]
    originals = [parameter.detach().clone() for parameter in matrices]
    print(f"{args.model}, {windows.numel():,} tokens of {args.text.name}")
    print(f"{'weights':10} {'perplexity':>10} {'to stored':>10}")
    for kind in args.types.split(","):
        for parameter, original in zip(matrices, originals, strict=True):
            is_inner = id(parameter) in inner
            parameter.data = original if kind == "stored" else rounded(original, kind, is_inner)
        found[kind] = perplexity(module, windows)
        share = found[kind] / found.get("stored", math.nan) - 1
        print(f"{kind:10} {found[kind]:10.3f} {share:+10.2%}", flush=True)
    print(msgspec.json.encode({"model": args.model, "perplexity": found}).decode())


if __name__ == "__main__":
    main()
