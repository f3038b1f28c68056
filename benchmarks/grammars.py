"""What structured outputs cost: masked streams beside free ones in the engine.

    python benchmarks/grammars.py [--model ../135m] [--streams 64] [--rounds 3]

Microseconds per masked row, and tokens per second of 64 streams. Free and masked streams take turns
on one engine, as many tokens each. `text` allows nearly every token, `records` is a list of JSON
objects: much of it is forced, and goes in fewer steps. Neither ends before its tokens do. Medians.
The last line is JSON.
"""

import asyncio
import statistics
import time
from typing import Any

import numpy as np
from harness import Args, Program, ratio, turns

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import ModelConfig, SpeculationConfig
from aioserve.features.grammars import GrammarCompiler
from aioserve.features.grammars.rows import GrammarRows
from aioserve.model_source.info import ModelInfo
from aioserve.params import StructuredOutputs

program = Program(__doc__)

RECORD = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "scene": {"type": "integer", "minimum": 1, "maximum": 9},
        "speakers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1},
    },
    "required": ["title", "scene", "speakers"],
    "additionalProperties": False,
}
WAYS = {
    "text": StructuredOutputs(regex=r"[^\x00]{3000}"),
    "records": StructuredOutputs(json={"type": "array", "items": RECORD, "minItems": 1000}),
}


async def tokens_per_second(
    engine: AsyncEngine, way: StructuredOutputs | None, streams: int, tokens: int, seed: int
) -> float:
    async def one(index: int) -> None:
        params = SamplingParams(
            max_tokens=tokens,
            temperature=1.0,
            seed=seed + index,
            structured_outputs=way,
            ignore_eos=way is None,
        )
        stream = await engine.add_request(f"{index}. Once", params)
        async for _ in stream:
            pass

    start = time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(streams)))
    return streams * tokens / (time.perf_counter() - start)


async def serve(args: Args) -> dict[str, list[float]]:
    without = SpeculationConfig(speculative_method="none")
    config = EngineConfig(model=ModelConfig(model=args.model), speculation=without)
    rates: dict[str, list[float]] = {}
    async with AsyncEngine(config) as engine:
        for turn, name in turns(["free", *WAYS], args.rounds + 1):
            way = WAYS.get(name)
            rate = await tokens_per_second(engine, way, args.streams, args.tokens, turn * 1000)
            if turn:  # the first one compiles
                rates.setdefault(name, []).append(rate)
    return rates


async def microseconds(args: Args) -> dict[str, dict[str, float]]:
    """Of the runner's steps, by row: the mask, the token that is taken, what is forced next."""
    info = ModelInfo(ModelConfig(model=args.model))
    compiler = GrammarCompiler(info)
    found = {}
    for name, way in WAYS.items():
        await compiler.check(way)
        rows = GrammarRows(compiler, info.vocab_size, info.eos_token_ids)
        every = np.arange(args.streams)
        for row in every.tolist():
            rows.rows[row] = compiler.matcher(way)
        spent = {"mask": 0.0, "token": 0.0, "forced": 0.0}
        rng = np.random.default_rng(0)
        for _ in range(args.tokens):
            start = time.perf_counter()
            started = rows.begin(every, {})
            assert started is not None
            masks = started.take(every, may_sit_out=False)
            spent["mask"] += time.perf_counter() - start
            allowed = masks.allowed(info.vocab_size)
            chosen = [[int(rng.choice(np.flatnonzero(own)))] for own in allowed]
            start = time.perf_counter()
            rows.append(every, chosen, {})
            spent["token"] += time.perf_counter() - start
            start = time.perf_counter()
            for row in every.tolist():
                rows.guesses(row)
            spent["forced"] += time.perf_counter() - start
        rows.close()
        count = args.streams * args.tokens
        found[name] = {key: round(seconds / count * 1e6, 1) for key, seconds in spent.items()}
    compiler.close()
    return found


@program.command(model="embedded", streams=64, tokens=100, rounds=3)
def main(args: Args) -> dict[str, Any]:
    """Masked streams, beside free ones."""
    result: dict[str, Any] = {"us_per_row": asyncio.run(microseconds(args))}
    for name, parts in result["us_per_row"].items():
        print(f"{name:8} us per row and step: {parts}")
    rates = asyncio.run(serve(args))
    for name, values in rates.items():
        rate, share = statistics.median(values), ratio(values, rates["free"])
        result[name] = {"tokens_per_s": round(rate), "to_free": share, "rates": values}
        print(f"{name:8} {rate:8.0f} tokens/s, {share:.2f} of free")
    return result


if __name__ == "__main__":
    program.main()
