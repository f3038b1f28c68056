"""What a KV connector is worth: a conversation that comes back, and prefill apart from decode.

    python benchmarks/kv_connector.py turns --model smollm2 --tokens 4000
    python benchmarks/kv_connector.py apart --rate 4 8 12

`turns`: the first token of a turn, by where its blocks are: computed, found in the pool, loaded
from host memory, and read from a directory by an engine that was started anew. It fails if any
reply has other tokens than the first one, or if blocks were not where the row says. The files are
in the page cache of the system: a disk that has to be read adds its own time.

`apart`: two simulated engines, two ways to share their work. Side by side: requests go to one and
the other in turn. Apart: each prompt is computed by the first, which hands its blocks over through
a directory, and the reply is made by the second. One virtual time, the same requests. The last line
is JSON.
"""

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from harness import Args, Opt, Program, Table, percentile

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.kv_cache import KVConnectorStats
from aioserve.lab.simulation.run import VirtualClockEventLoop
from aioserve.model_source.info import ModelInfo
from aioserve.runner.simulated import SimulatedRunner

BLOCK_SIZE = 16
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
MAX_MODEL_LEN = 16_384
TOKEN_BYTES = 131_072  # K and V of a token, apart

program = Program(__doc__)


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


def make_engine(args: Args, num_blocks: int, **cache: Any) -> AsyncEngine:
    config = EngineConfig(
        model=ModelConfig(model=args.model, max_model_len=args.tokens + 100),
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


async def measure(args: Args, folder: Path) -> dict[str, list[Any]]:
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


@program.command(
    "turns",
    model=Opt("smollm2", "as the server's --model"),
    tokens=Opt(4000, "length of the conversation"),
    repeats=Opt(3, "measurements of each kind"),
)
def turns(args: Args) -> tuple[dict[str, Any], int]:
    """The first token of a turn; the code is 1 if a row is not what it says."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(args, Path(folder)))
        num_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*.kv"))
    memory, *_, disk = found.pop("stats")
    table = Table({"blocks": "<10", "TTFT, ms": "11.1f", "least": "9.1f", "not computed": "15"})
    for name, results in found.items():
        seconds = [result[0] for result in results]
        row = {"TTFT, ms": 1e3 * statistics.median(seconds), "least": 1e3 * min(seconds)}
        table.add({"blocks": name, **row, "not computed": results[-1][2]})
    wrong = list(faults(found, args.tokens))
    print("\n".join(wrong) or "equal tokens in all rows", file=sys.stderr)
    told = {
        "rows": table.rows,
        "load_ms_per_request": round(1e3 * memory.load_seconds / args.repeats, 2),
        "read_ms_per_request": round(1e3 * disk.read_seconds, 2),
        "mib_on_disk": round(num_bytes / 2**20, 1),
        "faults": wrong,
    }
    return told, int(bool(wrong))


# Prefill apart.


class Ask(NamedTuple):
    """One request of the load."""

    arrival: float  # seconds
    prompt: list[int]
    num_output: int


def make_requests(rate: float, count: int) -> list[Ask]:
    """Poisson arrivals; prompts around 2,000 tokens with a long tail, replies around 150."""
    dice, now, asks = random.Random(0), 0.0, []
    for _ in range(count):
        now += dice.expovariate(rate)
        length = min(int(dice.lognormvariate(7.6, 0.7)) + 1, MAX_MODEL_LEN - 1000)
        num_output = min(int(dice.lognormvariate(5.0, 0.6)) + 2, 900)
        asks.append(Ask(now, [dice.randrange(5, 2_000) for _ in range(length)], num_output))
    return asks


def apart_config(args: Args, role: str | None) -> EngineConfig:
    cache: dict[str, Any] = {"num_kv_blocks": 30_000}
    if role is not None:
        cache |= {"kv_connector": "disk", "kv_role": role, "kv_connector_gib": 64.0}
    return EngineConfig(
        model=ModelConfig(max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=True),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(policy="chunked_prefill", options={"chunk_size": args.chunk}),
        runner=RunnerConfig(
            runner="simulated",
            profile="h200-llama-8b-roofline",
            step_kv_load_token_us=1e6 * TOKEN_BYTES / (args.copy_gbs * 1e9),
            step_kv_read_token_us=1e6 * TOKEN_BYTES / (args.read_gbs * 1e9),
            simulated_kv_token_bytes=TOKEN_BYTES,
        ),
    )


async def run(args: Args, asks: list[Ask], is_apart: bool) -> dict[str, float]:
    """Send all of it; latencies in milliseconds."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockEventLoop)
    engines, directory = [], None
    for role in ("producer", "consumer") if is_apart else (None, None):
        config = apart_config(args, role)
        runner = SimulatedRunner(config, ModelInfo(config.model), jump_to=loop.jump_to)
        if is_apart:
            directory = directory or runner.make_kv_store(1 << 40)
            runner.kv_directory = directory
        engines.append(AsyncEngine(config, runner=runner))
        await engines[-1].start()
    ttfts: list[float] = []
    gaps: list[float] = []

    async def ask(number: int, request: Ask) -> None:
        await asyncio.sleep(max(request.arrival - loop.time(), 0.0))
        began, last = loop.time(), 0.0
        if is_apart:
            first = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
            async for _ in engines[0].generate(request.prompt, first):
                pass
        engine = engines[1] if is_apart else engines[number % 2]
        params = SamplingParams(max_tokens=request.num_output, ignore_eos=True, detokenize=False)
        async for _ in engine.generate(request.prompt, params):
            if last:
                gaps.append(loop.time() - last)
            else:
                ttfts.append(loop.time() - began)
            last = loop.time()

    await asyncio.gather(*(ask(*pair) for pair in enumerate(asks)))
    seconds = loop.time()
    for engine in engines:
        await engine.shutdown()
    num_tokens = len(gaps) + len(ttfts)
    return {
        "ttft_p50": round(1e3 * percentile(ttfts, 50), 1),
        "ttft_p99": round(1e3 * percentile(ttfts, 99), 1),
        "gap_p50": round(1e3 * percentile(gaps, 50), 2),
        "gap_p99": round(1e3 * percentile(gaps, 99), 2),
        "output_tokens_per_s": round(num_tokens / seconds),
    }


@program.command(
    "apart",
    rate=Opt([4.0, 8.0, 12.0], "requests/s"),
    count=Opt(300, "requests"),
    chunk=Opt(512, "tokens of a step"),
    read_gbs=Opt(4.0, "of the directory, GB/s"),
    copy_gbs=Opt(40.0, "to and from the cache, GB/s"),
)
def apart(args: Args) -> dict[str, Any]:
    """Prefill apart from decode, beside engines side by side."""
    names = ("ttft_p50", "ttft_p99", "gap_p50", "gap_p99", "output_tokens_per_s")
    table = Table({"rate": "5", "way": "14", **dict.fromkeys(names, "21")})
    for rate in args.rate:
        asks = make_requests(rate, args.count)
        for is_apart in (False, True):
            with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
                found = runner.run(run(args, asks, is_apart))
            table.add({"rate": rate, "way": "apart" if is_apart else "side by side", **found})
    return {"rows": table.rows}


if __name__ == "__main__":
    program.main()
