"""How well a model predicts a text: by the type of its weights, of K and V, of activations.

    python benchmarks/perplexity.py TEXT
    python benchmarks/perplexity.py TEXT --model smollm2 --types bfloat16 int8 int4 Q4_1
    python benchmarks/perplexity.py TEXT --model smollm2 --kv-cache       # auto and int8
    python benchmarks/perplexity.py TEXT --model smollm2 --activations    # exact and int8
    python benchmarks/perplexity.py TEXT --model smollm2 --activations --kv-cache    # and both
    python benchmarks/perplexity.py TEXT --model FILE.gguf --beside-llama-cpp

Weights are rounded to a type and unpacked again, and `transformers` computes in float32: measured
are types, not kernels. `int4/64` is int4 in groups of 64 inputs. `stored` is what the model has on
disk; a file shows a type that nobody here writes (Q4_K, Q5_K, Q6_K). With `--kv-cache` weights stay
as they are and our own engine reads the windows, by `prompt_logprobs`, with each type of K and V;
with `--activations`, with activations as they are and quantized to int8; with both options, each
way of one with each of the other, of which the last also multiplies bytes in attention. With
`--activations` it also counts the tokens at which the first choice is the same, and those of greedy
replies up to the first that differs, after each window's first half.
TEXT is by default that of Python's own help pages. The last line is JSON.
"""

import asyncio
import itertools
import math
import operator
import re
import subprocess
from pathlib import Path
from pydoc_data import topics
from typing import Any, Literal, NamedTuple

import gguf
import torch
from build_peers import PEERS
from harness import Args, Opt, Program, Table
from torch import Tensor, nn

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import EMBEDDED_MODEL, CacheConfig, ModelConfig
from aioserve.features.quantized import quantize
from aioserve.model_source.info import ModelInfo

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
REPLY_TOKENS = 64
# `build_peers.py llama.cpp` puts it there.
LLAMA_PERPLEXITY = PEERS / "llama.cpp" / "llama-perplexity"
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
    writes = SamplingParams(max_tokens=max(reply_tokens, 1), temperature=0.0, ignore_eos=True)
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


def by_kv_cache(args: Args, windows: Tensor) -> dict[str, float]:
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


def by_activations(args: Args, windows: Tensor) -> dict[str, float]:
    """Perplexities with exact activations and those of int8, and how often both choose the same."""
    found: dict[str, Served] = {}
    kinds: list[tuple[str, Literal["int8"] | None, Literal["auto", "int8"]]]
    kinds = [("exact", None, "auto"), ("int8", "int8", "auto")]
    if args.kv_cache:
        kinds += [("exact, int8 K and V", None, "int8"), ("int8, int8 K and V", "int8", "int8")]
    for name, activations, kv_cache_dtype in kinds:
        model = ModelConfig(
            model=args.model,
            dtype=args.dtype,
            quantization=args.quantization,
            activations=activations,
        )
        cache = CacheConfig(enable_prefix_caching=False, kv_cache_dtype=kv_cache_dtype)
        config = EngineConfig(model=model, cache=cache)
        found[name] = asyncio.run(served(config, windows, REPLY_TOKENS))
    exact, int8 = found["exact"], found[kinds[-1][0]]
    first = windows.shape[1] // 2 + 1 if args.beside_llama_cpp else 1
    values = {kind: own.perplexity(first) for kind, own in found.items()}
    if args.beside_llama_cpp:
        values["llama.cpp"] = by_llama_cpp(args, windows)
    for name, value in values.items():
        print(f"{name:20} {value:10.3f} {value / values['exact'] - 1:+10.2%}")
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


def by_llama_cpp(args: Args, windows: Tensor) -> float:
    """Perplexity of the second halves of the same windows by llama.cpp's own program."""
    count, length = windows.shape
    command = [LLAMA_PERPLEXITY, "-m", args.model, "-f", args.text, "-c", length, "-b", length]
    command += ["--chunks", count, "-t", 1]  # more spin, and starve each other on busy cores
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if not (found := re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)):
        raise SystemExit(f"{LLAMA_PERPLEXITY} told no perplexity: {done.stderr[-500:]}")
    return float(found[1])


def by_types(args: Args, info: ModelInfo, windows: Tensor) -> dict[str, Any]:
    """Perplexities with weights of each type."""
    module = info.source.load_module(torch.float32, torch.device("cpu"), "sdpa")
    inner = {id(part.weight) for part in module.modules() if type(part) is nn.Linear}
    inner -= {id(module.get_input_embeddings().weight), id(module.get_output_embeddings().weight)}
    matrices = [p for p in module.parameters() if p.ndim == 2 and p.shape[1] % 32 == 0]
    originals = [parameter.detach().clone() for parameter in matrices]
    found: dict[str, float] = {}
    table = Table({"weights": "<10", "perplexity": "11.3f", "to stored": "11.2%"})
    for kind in args.types:
        for parameter, original in zip(matrices, originals, strict=True):
            is_inner = id(parameter) in inner
            parameter.data = original if kind == "stored" else rounded(original, kind, is_inner)
        found[kind] = perplexity(module, windows)
        share = found[kind] / found.get("stored", math.nan) - 1
        table.add({"weights": kind, "perplexity": found[kind], "to stored": share})
    return {"perplexity": found}


program = Program(__doc__)


@program.command(
    words={"text": Opt(topics.__file__, "a file")},
    model=EMBEDDED_MODEL,
    types=TYPES,
    tokens=Opt(8192, "of the end of the text"),
    length=Opt(512, "tokens that are read together"),
    kv_cache=Opt(False, "types of K and V, not of weights"),
    activations=Opt(False, "exact activations and int8"),
    beside_llama_cpp=Opt(False, "--activations, and theirs"),
    quantization=Opt(str, "with --activations", ("int8", "int4")),
    dtype=Opt("auto", "to compute in, where our engine does"),
)
def main(args: Args) -> dict[str, Any]:
    """Print a row per type."""
    info = ModelInfo(ModelConfig(model=args.model))
    ids = info.tokenizer(Path(args.text).read_text(encoding="utf-8"))["input_ids"]
    print(f"{args.model}, of {Path(args.text).name}")
    ids = ids[: args.tokens] if args.beside_llama_cpp else ids[-args.tokens :]
    windows = torch.tensor(ids[: len(ids) // args.length * args.length]).view(-1, args.length)
    print(f"{windows.numel():,} tokens")
    if args.activations or args.beside_llama_cpp:
        return {"served": by_activations(args, windows)}
    if args.kv_cache:
        return {"served": by_kv_cache(args, windows)}
    return by_types(args, info, windows)


if __name__ == "__main__":
    program.main()
