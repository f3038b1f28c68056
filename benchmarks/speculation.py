"""What speculation is worth: tokens per second with n-grams against without, on a rewriting task.

    python benchmarks/speculation.py [--model smollm2] [--streams 1 4 16] [--rounds 3]

Each prompt asks for a piece of this repository's code again, with one name changed: what a coding
assistant does. Two engines in this process, one with and one without, take turns on the same
prompts; no prompt comes twice, so none is known from an earlier round. Greedy, so many tokens each.
Medians of the rounds. The last line is JSON.
"""

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Literal

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import ModelConfig, SpeculationConfig

ROOT = Path(__file__).parents[1]
LINES = 30  # of code in a prompt


def excerpts() -> list[str]:
    """Pieces of our own code, each once."""
    found = []
    for path in sorted((ROOT / "aioserve").rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        pieces = [lines[at : at + LINES] for at in range(0, len(lines) - LINES, LINES)]
        found += ["\n".join(piece) for piece in pieces]
    return found


async def start(model: str, method: Literal["none", "ngram"]) -> AsyncEngine:
    engine = AsyncEngine(
        EngineConfig(
            model=ModelConfig(model=model, max_model_len=2048),
            speculation=SpeculationConfig(speculative_method=method),
        )
    )
    await engine.__aenter__()
    return engine


async def tokens_per_second(engine: AsyncEngine, texts: list[str], num_tokens: int) -> float:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)

    async def one(text: str) -> None:
        question = f"Write this code again, with `self` renamed to `this`:\n```\n{text}\n```"
        stream = await engine.add_request([{"role": "user", "content": question}], params)
        async for _ in stream:
            pass

    begin = time.perf_counter()
    await asyncio.gather(*map(one, texts))
    return len(texts) * num_tokens / (time.perf_counter() - begin)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    options = parser.parse_args()
    off, on = await start(options.model, "none"), await start(options.model, "ngram")
    texts, result = iter(excerpts()), {}
    for engine in (off, on):
        await tokens_per_second(engine, [next(texts)], 20)
    for streams in options.streams:
        rounds = []
        for number in range(options.rounds):
            batch = [next(texts) for _ in range(streams)]
            order = [("off", off), ("ngram", on)][:: -1 if number % 2 else 1]
            rounds.append({n: await tokens_per_second(e, batch, options.tokens) for n, e in order})
        median = {n: statistics.median(r[n] for r in rounds) for n in ("off", "ngram")}
        ratio = statistics.median(r["ngram"] / r["off"] for r in rounds)
        result[streams] = {**{n: round(v, 1) for n, v in median.items()}, "ratio": round(ratio, 2)}
        print(
            f"{streams:3} streams: {median['off']:7.1f} tokens/s without, {median['ngram']:7.1f} "
            f"with n-grams, {ratio:.2f} times"
        )
    stats = on.get_stats()
    print(f"{stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens were right")
    for engine in (off, on):
        await engine.__aexit__(None, None, None)
    accepted = round(stats.num_accepted_tokens / max(stats.num_draft_tokens, 1), 2)
    print(json.dumps({"streams": result, "accepted": accepted}))


asyncio.run(main())
