"""How well a model predicts a text, by the type of its weights.

    python benchmarks/perplexity.py TEXT
    python benchmarks/perplexity.py TEXT --model smollm2 --types bfloat16,int8,int4,Q4_1
    python benchmarks/perplexity.py TEXT --model smollm2 --kv-cache       # auto and int8
    python benchmarks/perplexity.py TEXT --model smollm2 --activations    # exact and int8
    python benchmarks/perplexity.py TEXT --model FILE.gguf --beside-llama-cpp

Weights are rounded to a type and unpacked again, and `transformers` computes in float32: measured
are types, not kernels. `int4/64` is int4 in groups of 64 inputs. `stored` is what the model has on
disk; a file shows a type that nobody here writes (Q4_K, Q5_K, Q6_K). With `--kv-cache` weights stay
as they are and our own engine reads the windows, by `prompt_logprobs`, with each type of K and V;
with `--activations`, with activations as they are and quantized to int8. Then it also counts the
tokens at which the first choice is the same, and those of greedy replies up to the first that
differs, after each window's first half. The last line is JSON.
"""

import argparse
import asyncio
import itertools
import math
import operator
import re
import subprocess
from pathlib import Path
from typing import Any, Literal, NamedTuple

import gguf
import msgspec
import torch
from build_peers import PEERS
from torch import Tensor, nn

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import EMBEDDED_MODEL, CacheConfig, ModelConfig
from aioserve.features.quantized.blocks import quantize
from aioserve.model_source.info import ModelInfo

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
REPLY_TOKENS = 64
LLAMA_PERPLEXITY = (
    PEERS / "llama.cpp" / "llama-perplexity"
)  # `build_peers.py llama.cpp` puts it there
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


class Served(NamedTuple):
    """What our engine makes of the windows."""

    losses: Tensor  # [N, length - 1], of every token but the first of each window
    choices: list[int]  # the first choice for each of them
    replies: list[list[int]]  # greedy, to the first half of each window

    def perplexity(self, first: int = 1) -> float:
        """Of the tokens of each window from `first` on, the window's first one being 0."""
        return math.exp(float(self.losses[:, first - 1 :].mean()))


async def served(config: EngineConfig, windows: Tensor, reply_tokens: int = 0) -> Served:
    """Read the windows by an engine, and let it continue their first halves."""
    reads = SamplingParams(max_tokens=1, prompt_logprobs=1)
    writes = SamplingParams(max_tokens=reply_tokens, temperature=0.0, ignore_eos=True)
    losses, choices, replies = list[float](), list[int](), list[list[int]]()
    async with AsyncEngine(config) as engine:
        for window in windows.tolist():
            async for output in engine.generate(window, reads):
                for entry in filter(None, output.prompt_logprobs or ()):
                    losses.append(-entry.logprob)
                    choices.append(entry.top_token_ids[0])
            reply: list[int] = []
            if reply_tokens:
                async for output in engine.generate(window[: len(window) // 2], writes):
                    reply += output.token_ids
            replies.append(reply)
    lost = torch.tensor(losses, dtype=torch.float64).view(len(windows), -1)
    return Served(lost, choices, replies)


def by_kv_cache(args: argparse.Namespace, windows: Tensor) -> dict[str, float]:
    """Perplexities with K and V as they are and in int8."""
    found: dict[str, float] = {}
    kinds: tuple[Literal["auto", "int8"], ...] = ("auto", "int8")
    for kind in kinds:
        config = EngineConfig(
            model=ModelConfig(model=args.model, dtype=args.dtype),
            cache=CacheConfig(kv_cache_dtype=kind, enable_prefix_caching=False),
        )
        found[kind] = asyncio.run(served(config, windows)).perplexity()
        print(f"{kind:10} {found[kind]:10.3f} {found[kind] / found['auto'] - 1:+10.2%}")
    return found


def by_activations(args: argparse.Namespace, windows: Tensor) -> dict[str, float]:
    """Perplexities with exact activations and those of int8, and how often both choose the same."""
    found: dict[str, Served] = {}
    kinds: tuple[Literal["int8"] | None, ...] = (None, "int8")
    for kind in kinds:
        model = ModelConfig(
            model=args.model,
            dtype=args.dtype,
            quantization=args.quantization,
            activations=kind,
        )
        config = EngineConfig(model=model, cache=CacheConfig(enable_prefix_caching=False))
        found[kind or "exact"] = asyncio.run(served(config, windows, REPLY_TOKENS))
    exact, int8 = found["exact"], found["int8"]
    first = windows.shape[1] // 2 + 1 if args.beside_llama_cpp else 1
    values = {kind: own.perplexity(first) for kind, own in found.items()}
    if args.beside_llama_cpp:
        values["llama.cpp"] = by_llama_cpp(args, windows)
    for name, value in values.items():
        print(f"{name:10} {value:10.3f} {value / values['exact'] - 1:+10.2%}")
    same = sum(map(operator.eq, exact.choices, int8.choices)) / len(exact.choices)
    prefixes = [
        sum(itertools.takewhile(bool, map(operator.eq, own, other)))
        for own, other in zip(exact.replies, int8.replies, strict=True)
    ]
    print(f"the first choice is the same for {same:.2%} of {len(exact.choices):,} tokens")
    whole = sum(length == REPLY_TOKENS for length in prefixes)
    print(
        f"{whole} of {len(prefixes)} greedy replies of {REPLY_TOKENS} tokens are the same; "
        f"{sum(prefixes) / len(prefixes):.1f} tokens in the mean before the first that differs"
    )
    return values | {"same_choices": same, "same_replies": whole / len(prefixes)}


def by_llama_cpp(args: argparse.Namespace, windows: Tensor) -> float:
    """Perplexity of the second halves of the same windows by llama.cpp's own program."""
    count, length = windows.shape
    command = [LLAMA_PERPLEXITY, "-m", args.model, "-f", args.text, "-c", length, "-b", length]
    command += [
        "--chunks",
        count,
        "-t",
        1,
    ]  # more threads spin, and starve each other on busy cores
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if not (found := re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)):
        raise SystemExit(f"{LLAMA_PERPLEXITY} told no perplexity: {done.stderr[-500:]}")
    return float(found[1])


def main() -> None:
    """Print a row per type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--types", default=",".join(TYPES), help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=8192, help="of the end of the text")
    parser.add_argument("--length", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--kv-cache", action="store_true", help="types of K and V, not of weights")
    parser.add_argument("--activations", action="store_true", help="exact activations and int8")
    parser.add_argument("--beside-llama-cpp", action="store_true", help="--activations, and theirs")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="with --activations")
    parser.add_argument("--dtype", default="auto", help="to compute in, where our engine does")
    args = parser.parse_args()
    info = ModelInfo(ModelConfig(model=args.model))
    ids = info.tokenizer(args.text.read_text(encoding="utf-8"))["input_ids"]
    ids = ids[: args.tokens] if args.beside_llama_cpp else ids[-args.tokens :]
    windows = torch.tensor(ids[: len(ids) // args.length * args.length]).view(-1, args.length)
    if args.kv_cache or args.activations or args.beside_llama_cpp:
        read = by_kv_cache if args.kv_cache else by_activations
        values = read(args, windows)
        print(msgspec.json.encode({"model": args.model, "served": values}).decode())
        return
    found = {}
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
