"""What compute threads are worth: beside busy processes, and as ranks of a model.

    python benchmarks/threads.py neighbours                # the embedded model, one neighbour
    python benchmarks/threads.py neighbours --model ../135m --streams 16 --neighbours 2
    python benchmarks/threads.py ranks [--rounds 20]

`neighbours` starts a server for each fixed number of threads and one that chooses. They take turns
with the same texts, alone and beside the neighbours, round after round; what is compared was
measured in the same round. `ranks` compares two ranks of one thread with one rank of two, in turns,
on SmolLM2-135M with 4 KV heads for 3 and 8 heads for 9, as 3 cannot be shared by two; times of all
processes are counted. The last line is JSON.
"""

import asyncio
import contextlib
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

from harness import (
    Args,
    LoadShape,
    Opt,
    Program,
    Table,
    cpu_seconds,
    process,
    ratio,
    serving,
    tree,
    turns,
)
from make_model import SHAPES, model_path
from peers import COLUMNS, RATE, run

from aioserve import AsyncEngine, SamplingParams
from aioserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SpeculationConfig,
)
from aioserve.lab.bench import Document
from aioserve.runner.cpu.machine import default_num_threads

CHOOSES = "chooses"
ALONE, BESIDE = "alone", "beside neighbours"
BUSY = "while True: pass"

SHAPE = SHAPES["135m-4kv"]
# Streams, tokens of each prompt, tokens of each reply.
LOADS = {"decode 1": (1, 1, 8), "decode 16": (16, 1, 8), "prompt of 512": (1, 512, 1)}

program = Program(__doc__)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """As many processes that compute all the time."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(process("-c", BUSY))
        yield


def compare(rounds: list[dict[str, float]], others: list[str]) -> dict[str, float]:
    """The server that chooses against the best of `others`, within each round."""
    ratios = [rates[CHOOSES] / max(rates[name] for name in others) for rates in rounds]
    found = {"median": statistics.median(ratios), "worst": min(ratios), "best": max(ratios)}
    return {name: round(value, 3) for name, value in found.items()}


@program.command(
    "neighbours",
    model="embedded",
    streams=8,
    input_tokens=100,
    output_tokens=100,
    seconds=Opt(10.0, "of each load"),
    rounds=5,
    neighbours=1,
    threads=Opt(
        sorted({"1", str(default_num_threads())}, key=int),
        "fixed numbers to compare with; the last is what a server had without a choice",
    ),
)
def neighbours(args: Args) -> tuple[dict[str, Any], int]:
    """A number of threads that the server chooses, beside fixed ones."""
    most = math.ceil(args.seconds * 40)  # requests of a stream: more than it can have
    shape = LoadShape(args.streams, args.input_tokens, args.output_tokens, per_stream=most)
    names = [*args.threads, CHOOSES]
    found: dict[str, list[dict[str, Document]]] = {ALONE: [], BESIDE: []}
    seed = random.randrange(1 << 40)
    with contextlib.ExitStack() as stack:
        urls = {}
        for name in names:
            words = () if name == CHOOSES else ("--threads", name)
            urls[name] = stack.enter_context(serving("--model", args.model, *words)).url
        for number, where in itertools.product(range(args.rounds), (ALONE, BESIDE)):
            order = names[number % len(names) :] + names[: number % len(names)]
            with busy(args.neighbours if where == BESIDE else 0):
                found[where].append(
                    {name: run(urls[name], shape, seed, args.seconds, True) for name in order}
                )
            seed += 2
    told: dict[str, Any] = {"errors": 0}
    for where, rounds in found.items():
        table = Table({"threads": "<12", **dict.fromkeys(COLUMNS, "13.1f")}, where)
        for name in names:
            own = [documents[name] for documents in rounds]
            told["errors"] += sum(len(document["errors"]) for document in own)
            values = {label: statistics.median(map(value, own)) for label, value in COLUMNS.items()}
            table.add({"threads": name, **values})
        rates = [{name: RATE(documents[name]) for name in names} for documents in rounds]
        told[where] = {
            "tokens_per_second": rates,
            "to_best_fixed": compare(rates, names[:-1]),
            "to_most_threads": compare(rates, names[-2:-1]),
        }
        for key in ("to_best_fixed", "to_most_threads"):
            print(f"{CHOOSES} {key.replace('_', ' ')}: {told[where][key]}")
    return told, int(told["errors"] > 0)


def make_engine(num_ranks: int) -> AsyncEngine:
    return AsyncEngine(
        EngineConfig(
            model=ModelConfig(
                model=str(model_path("135m-4kv")), dtype="float32", skip_tokenizer_init=True
            ),
            cache=CacheConfig(num_kv_blocks=512, enable_prefix_caching=False),
            runner=RunnerConfig(tensor_parallel_size=num_ranks, threads=2),
            speculation=SpeculationConfig(speculative_method="none"),
        )
    )


async def measure(engine: AsyncEngine, streams: int, prompt: int, reply: int) -> tuple[float, ...]:
    """Seconds on the clock, and of CPU of all processes."""

    def spent() -> float:
        return sum(map(cpu_seconds, tree(os.getpid())))

    async def one(number: int) -> None:
        ids = [(number + 7 * place) % 40_000 + 16 for place in range(prompt)]
        params = SamplingParams(temperature=0, max_tokens=reply, ignore_eos=True, detokenize=False)
        async for _ in engine.generate(ids, params):
            pass

    began = time.perf_counter(), spent()
    await asyncio.gather(*map(one, range(streams)))
    return time.perf_counter() - began[0], spent() - began[1]


@program.command("ranks", rounds=20)
async def ranks(args: Args) -> dict[str, Any]:
    """Two ranks of one thread against one rank of two."""
    found = {}
    async with make_engine(1) as one, make_engine(2) as two:
        engines = {1: one, 2: two}
        for name, load in LOADS.items():
            seconds: dict[int, list[tuple[float, ...]]] = {1: [], 2: []}
            for _, num_ranks in turns([1, 2], args.rounds + 1):
                seconds[num_ranks].append(await measure(engines[num_ranks], *load))
            row: dict[str, float] = {}
            for place, kind in enumerate(("wall", "cpu")):
                own = {n: [pair[place] for pair in pairs[1:]] for n, pairs in seconds.items()}
                row |= {f"{kind}_ms_{n}": 1e3 * min(values) for n, values in own.items()}
                row[f"{kind}_ratio"] = min(own[2]) / min(own[1])
                row[f"{kind}_median_ratio"] = ratio(own[2], own[1])
            found[name] = {key: round(value, 3) for key, value in row.items()}
            print(name, found[name], flush=True)
    return {"loads": found}


if __name__ == "__main__":
    program.main()
