"""What a conversation that comes back waits for: its first token, by where its blocks are.

    python benchmarks/kv_connector.py --model smollm2 --tokens 4000

Computed, found in the pool, loaded from host memory, and read from a directory by an engine that
was started anew. It fails if any reply has other tokens than the first one, or if blocks were not
where the row says. The files are in the page cache of the system: a disk that has to be read adds
its own time. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, SchedulerConfig
from aioserve.kv_cache import KVConnectorStats

BLOCK_SIZE = 16
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)


class Conversations:
    """Random tokens, so that nothing is shared; `turn` is what comes back, a little longer."""

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        dice = random.Random(0)
        self.ours, self.other = (
            [dice.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(2)
        )
        self.turn = [*self.ours, *(dice.randrange(vocab_size) for _ in range(20))]


async def ask(engine: AsyncEngine, prompt: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token, all tokens, prompt tokens that were not computed."""
    began, first, token_ids = time.perf_counter(), 0.0, []
    async for output in engine.generate(prompt, PARAMS):
        first = first or time.perf_counter() - began
        token_ids += output.token_ids
    return first, token_ids, output.num_cached_tokens


def make_engine(args: argparse.Namespace, num_blocks: int, **cache: Any) -> AsyncEngine:
    config = EngineConfig(
        model=ModelConfig(model=args.model, dtype=args.dtype, max_model_len=args.tokens + 100),
        cache=CacheConfig(
            block_size=BLOCK_SIZE, num_kv_blocks=num_blocks, kv_connector_gib=4.0, **cache
        )
        if cache
        else CacheConfig(block_size=BLOCK_SIZE, num_kv_blocks=num_blocks),
        scheduler=SchedulerConfig(policy="chunked_prefill", max_num_seqs=4),
    )
    return AsyncEngine(config)


def stats_of(engine: AsyncEngine) -> KVConnectorStats:
    connector = engine.metrics.kv_connector.connector
    assert connector is not None
    return connector.make_stats()


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, list[Any]]:
    """By where the blocks are: what `ask` returned for each repetition, and of loads the stats."""
    one = -(-(args.tokens + 100) // BLOCK_SIZE)
    found: dict[str, list[Any]] = {"computed": [], "pool": [], "memory": [], "disk": []}
    stats: list[Any] = []
    async with make_engine(args, 2 * one) as engine:
        talk = Conversations(args.tokens, engine.model_info.vocab_size)
        for _ in range(args.repeats):
            engine.reset_prefix_cache()
            found["computed"].append(await ask(engine, talk.turn))
            engine.reset_prefix_cache()
            await ask(engine, talk.ours)
            found["pool"].append(await ask(engine, talk.turn))
    async with make_engine(args, one + 8, kv_connector="memory") as engine:
        for _ in range(args.repeats):
            engine.reset_prefix_cache()  # else the last one's turn is found as well
            await ask(engine, talk.ours)
            await ask(engine, talk.other)  # takes its place in the pool
            found["memory"].append(await ask(engine, talk.turn))
        stats.append(stats_of(engine))
    disk = {"kv_connector": "disk", "kv_connector_path": str(folder)}
    async with make_engine(args, one + 8, **disk) as engine:
        await ask(engine, talk.ours)
    for _ in range(args.repeats):
        async with make_engine(args, one + 8, **disk, kv_role="consumer") as engine:
            await ask(engine, talk.other[:40])  # what a first request costs is not the point
            found["disk"].append(await ask(engine, talk.turn))
            stats.append(stats_of(engine))
    found["stats"] = stats
    return found


def faults(found: dict[str, list[Any]], num_tokens: int) -> Iterator[str]:
    """What is wrong with which row: tokens, or where its blocks were."""
    expected = found["computed"][0][1]
    held = num_tokens // BLOCK_SIZE * BLOCK_SIZE
    for name, results in found.items():
        for i, (_, token_ids, num_cached) in enumerate(results):
            if token_ids != expected:
                yield f"{name}, repetition {i}: tokens {token_ids}, not {expected}"
            if num_cached != (0 if name == "computed" else held):
                yield f"{name}, repetition {i}: {num_cached} tokens were not computed"


def main() -> int:
    """Print the table and the JSON. Returns 1 if a row is not what it says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="as the server's --model")
    parser.add_argument("--dtype", default="auto", help="as the server's --dtype")
    parser.add_argument("--tokens", type=int, default=4000, help="length of the conversation")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each kind")
    parser.add_argument("--path", help="where the directory is made (default: for temporary files)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.path) as folder:
        found = asyncio.run(measure(args, Path(folder)))
        num_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*.kv"))
    memory, *_, disk = found.pop("stats")
    rows: dict[str, Any] = {}
    print(f"{'blocks':10} {'TTFT, ms':>10} {'least':>8} {'not computed':>14}")
    for name, results in found.items():
        seconds = [result[0] for result in results]
        rows[name] = {
            "ttft_ms": round(1e3 * statistics.median(seconds), 1),
            "least_ms": round(1e3 * min(seconds), 1),
            "num_cached_tokens": results[-1][2],
        }
        row = rows[name]
        print(
            f"{name:10} {row['ttft_ms']:10.1f} {row['least_ms']:8.1f} {row['num_cached_tokens']:14}"
        )
    wrong = list(faults(found, args.tokens))
    print("\n".join(wrong) or "equal tokens in all rows", file=sys.stderr)
    print(
        json.dumps(
            {
                "model": args.model,
                "tokens": args.tokens,
                "repeats": args.repeats,
                "rows": rows,
                "load_ms_per_request": round(1e3 * memory.load_seconds / args.repeats, 2),
                "read_ms_per_request": round(1e3 * disk.read_seconds, 2),
                "mib_on_disk": round(num_bytes / 2**20, 1),
                "faults": wrong,
            }
        )
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
