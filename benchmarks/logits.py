"""What it is worth that logits are written in float32, not rounded to bfloat16 as the weights are.

    python benchmarks/logits.py [TEXT] [--model smollm2] [--prompts 200]
    python benchmarks/logits.py --cost     # of a head that writes float32, to one that rounds

Pieces of TEXT, by default of Python's own help pages, are prompts. A reference in float32
continues each greedily; then the model in bfloat16 reads prompt and reply, once with its logits
rounded to bfloat16 and once as they are. Counted are the tokens of the replies at which its first
choice is the reference's, those at which two tokens share the first place, and the replies that it
writes itself like the reference to the end. The perplexity is that of the pieces. The last line is
JSON.
"""

import argparse
import asyncio
import math
import statistics
import time
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import msgspec
import torch

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig
from aioserve.kernels import load_kernels
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.products import PanelLinear
from aioserve.runner.fused.model import FusedModel

PROMPT_TOKENS = 64
REPLY_TOKENS = 64
KINDS = ("float32", "bfloat16, rounded", "bfloat16")


class Read(NamedTuple):
    """What a model makes of the prompts and of the reference's replies."""

    replies: list[list[int]]  # its own, greedily
    loss: float  # of all tokens of the prompts but their first
    num_same: int  # tokens of the reference's replies that are its first choice
    num_ties: int  # of them and all others: where the first place is shared


class Rounded:
    """Inside the block, logits are rounded to bfloat16, as products of that type are."""

    def __enter__(self) -> None:
        self._whole = {name: getattr(FusedModel, name) for name in ("forward", "logits")}
        for name, method in self._whole.items():
            setattr(FusedModel, name, self._rounding(method))

    def __exit__(self, *_: object) -> None:
        for name, method in self._whole.items():
            setattr(FusedModel, name, method)

    @staticmethod
    def _rounding(method: Any) -> Any:
        return lambda *args: method(*args).to(torch.bfloat16)


async def collect(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> Any:
    """The tokens of the reply, and the log-probabilities of the prompt's tokens."""
    tokens: list[int] = []
    of_prompt: Any = None
    async for output in engine.generate(prompt, params):
        tokens += output.token_ids
        of_prompt = of_prompt or output.prompt_logprobs
    return tokens, of_prompt


async def read(
    model: str, dtype: Any, prompts: list[list[int]], reference: list[list[int]] | None
) -> Read:
    """Let a model write its own replies, then read those of the `reference`, or its own."""
    config = EngineConfig(
        model=ModelConfig(model=model, dtype=dtype), cache=CacheConfig(enable_prefix_caching=False)
    )
    writes = SamplingParams(max_tokens=REPLY_TOKENS, temperature=0.0, ignore_eos=True)
    reads = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    loss, num_same, num_ties = 0.0, 0, 0
    async with AsyncEngine(config) as engine:
        written = await asyncio.gather(*(collect(engine, prompt, writes) for prompt in prompts))
        replies = [tokens for tokens, _ in written]
        for prompt, reply in zip(prompts, reference or replies, strict=True):
            _, entries = await collect(engine, prompt + reply, reads)
            loss -= sum(entry.logprob for entry in entries[1 : len(prompt)])
            for entry, token in zip(entries[len(prompt) :], reply, strict=True):
                num_ties += entry.top_logprobs[0] == entry.top_logprobs[1]
                num_same += entry.top_token_ids[0] == token
    return Read(replies, loss, num_same, num_ties)


def cost() -> None:
    """Time the product of SmolLM2's head in alternation, and print the median ratio."""
    machine.keep_freed_memory()  # as a server does
    kernels, generator = load_kernels(), torch.Generator().manual_seed(0)
    weight = torch.randn(49152, 576, generator=generator).bfloat16()
    types = (torch.bfloat16, torch.float32)
    heads = [PanelLinear.of(kernels, weight, None, dtype) for dtype in types]
    print(f"{'rows':>6} {'bfloat16, ms':>13} {'float32, ms':>13} {'ratio':>7}")
    for num_rows in (1, 16, 64, 256):
        x = torch.randn(num_rows, 576, generator=generator).bfloat16()
        times: list[list[float]] = [[], []]
        for _ in range(60):
            for head, own in zip(heads, times, strict=True):
                begin = time.perf_counter()
                head(x)
                own.append(1e3 * (time.perf_counter() - begin))
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        narrow, wide = map(statistics.median, times)
        print(f"{num_rows:6} {narrow:13.2f} {wide:13.2f} {ratio:7.3f}")


def main() -> None:
    """Print a row per type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path, nargs="?", default=Path(topics.__file__))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--cost", action="store_true", help="time the head alone")
    args = parser.parse_args()
    if args.cost:
        cost()
        return
    info = ModelInfo(ModelConfig(model=args.model))
    ids = info.tokenizer(args.text.read_text(encoding="utf-8"))["input_ids"]
    stride = (len(ids) - PROMPT_TOKENS) // args.prompts
    prompts = [ids[i * stride : i * stride + PROMPT_TOKENS] for i in range(args.prompts)]
    num_tokens = args.prompts * REPLY_TOKENS
    print(f"{args.model}, {args.prompts} prompts of {args.text.name}, {num_tokens:,} tokens")
    print(f"{'logits':18} {'same token':>10} {'ties':>6} {'same reply':>10} {'perplexity':>10}")
    reference: list[list[int]] | None = None
    found = {}
    for kind in KINDS:
        if kind.endswith("rounded"):
            with Rounded():
                seen = asyncio.run(read(args.model, "bfloat16", prompts, reference))
        else:
            seen = asyncio.run(read(args.model, kind, prompts, reference))
        reference = reference or seen.replies
        num_whole = sum(map(list.__eq__, seen.replies, reference))
        value = math.exp(seen.loss / args.prompts / (PROMPT_TOKENS - 1))
        found[kind] = {
            "same_tokens": seen.num_same / num_tokens,
            "ties": seen.num_ties,
            "same_replies": num_whole,
            "perplexity": value,
        }
        print(
            f"{kind:18} {seen.num_same / num_tokens:10.2%} {seen.num_ties:6} {num_whole:10} "
            f"{value:10.4f}",
            flush=True,
        )
    print(msgspec.json.encode({"model": args.model, "logits": found}).decode())


if __name__ == "__main__":
    main()
