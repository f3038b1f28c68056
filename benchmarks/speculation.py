"""What speculation is worth: tokens per second with it against without, on two tasks.

    python benchmarks/speculation.py [--task rewrite] [--streams 1 4 16] [--rounds 3]
    python benchmarks/speculation.py --task chat [--draft-model SMALL]   # else by n-grams
    python benchmarks/speculation.py --task lookup    # no model: microseconds and bytes per token
    python benchmarks/speculation.py --task wrong     # simulated, all guesses wrong

`rewrite` asks for a piece of this repository's code again, with one name changed: what a coding
assistant does. Greedy. `chat` asks a short question and samples at temperature 1: little stands in
the text that could come again, so this shows what guessing costs where it does not pay.

Two engines in this process, one with and one without, take turns on the same prompts; no prompt
comes twice, so none is known from an earlier round. As many tokens each. Medians of the rounds, and
of the ratios of each; of processor time as well, which other processes disturb less. The last line
is JSON.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
import timeit
import tracemalloc
from pathlib import Path
from typing import NamedTuple

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import ModelConfig, RunnerConfig, SchedulerConfig, SpeculationConfig
from aioserve.features.spec_decode.ngram import NgramText
from aioserve.lab.simulation.run import simulate
from aioserve.lab.workloads.synthetic import (
    ClientClass,
    ClosedLoop,
    Constant,
    WorkloadSpec,
    generate,
)

ROOT = Path(__file__).parents[1]
LINES = 30  # of code in a prompt
REWRITE = "Write this code again, with `self` renamed to `this`:\n```\n{}\n```"
CHAT = (
    *("Tell me about {}.", "Why do people like {}?", "Write a letter to a friend about {}."),
    *("What would you ask an expert on {}?", "Invent a story in which {} matters."),
    *("Describe {} to a child.", "What changed with {} in a hundred years?"),
    *("Plan an evening around {}.", "Who should not care for {}, and why?"),
)
SUBJECTS = (
    *("bees", "old maps", "night trains", "sourdough", "chess", "volcanoes", "umbrellas", "jazz"),
    *("lighthouses", "bicycles", "the moon", "tea", "glaciers", "libraries", "kites", "salt"),
    *("owls", "bridges", "marathons", "soap", "comets", "gardens", "violins", "paper", "deserts"),
    *("harbours", "clocks", "mushrooms", "rain", "markets", "whales", "bread", "islands", "wool"),
)


def excerpts() -> list[str]:
    """Pieces of our own code, each once."""
    found = []
    for path in sorted((ROOT / "aioserve").rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        pieces = [lines[at : at + LINES] for at in range(0, len(lines) - LINES, LINES)]
        found += ["\n".join(piece) for piece in pieces]
    return found


def time_lookups(num_tokens: int = 4096) -> None:
    """What `NgramText` takes for tokens without repeats, the best of many times."""
    rng = random.Random(1)
    token_ids = [rng.randrange(49152) for _ in range(num_tokens)]

    def known() -> NgramText:
        text = NgramText(3)
        text.extend(token_ids)
        text.find(())
        return text

    def one_by_one() -> None:
        text = NgramText(3)
        for token_id in token_ids:
            text.extend((token_id,))
            text.find(())

    text = known()
    missing, found = text.token_ids[-16:], text.token_ids[1000:1016]
    for name, call, times in (
        ("entered together", known, num_tokens),
        ("entered one by one", one_by_one, num_tokens),
        ("looked up, not found", lambda: text.find(missing), 1),
        ("looked up, 16 agree", lambda: text.find(found), 1),
    ):
        number = 5 * num_tokens // times // 10 + 1
        best = min(timeit.repeat(call, time.thread_time, number=number, repeat=25))
        print(f"{name:22} {best / number / times * 1e6:6.2f} us")
    tracemalloc.start()
    text = known()
    print(f"{'memory':22} {tracemalloc.get_traced_memory()[0] / num_tokens:6.0f} bytes a token")


def simulate_wrong() -> None:
    """The speed with guesses for everybody in every step, all of them wrong, to that without."""
    for profile, clients in itertools.product(("example", "embedded-cpu"), (1, 4, 16, 64)):
        kind = ClientClass(
            name="c", prompt=Constant(value=60), output=Constant(value=200), draft_acceptance=0.0
        )
        spec = WorkloadSpec(
            classes=[kind], arrivals=ClosedLoop(clients=clients), num_requests=12 * clients
        )
        seconds = []
        for num_drafts in (0, 8):
            runner = RunnerConfig(
                runner="simulated", profile=profile, simulated_draft_tokens=num_drafts
            )
            config = EngineConfig(runner=runner, scheduler=SchedulerConfig(max_num_seqs=64))
            seconds.append(simulate(config, generate(spec)).end)
        print(f"{profile:14} {clients:3} requests at a time: {seconds[0] / seconds[1]:.3f} times")


def questions(task: str) -> list[str]:
    """Of one task, each once."""
    if task == "rewrite":
        return [REWRITE.format(text) for text in excerpts()]
    return [question.format(subject) for question in CHAT for subject in SUBJECTS]


async def start(model: str, speculation: SpeculationConfig) -> AsyncEngine:
    engine = AsyncEngine(
        EngineConfig(model=ModelConfig(model=model, max_model_len=2048), speculation=speculation)
    )
    await engine.__aenter__()
    return engine


class Speed(NamedTuple):
    """Of one batch."""

    tokens_per_second: float
    cpu_seconds: float


async def measure(
    engine: AsyncEngine, batch: list[str], num_tokens: int, temperature: float
) -> Speed:
    async def one(seed: int, question: str) -> None:
        params = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, seed=seed, ignore_eos=True
        )
        stream = await engine.add_request([{"role": "user", "content": question}], params)
        async for _ in stream:
            pass

    begin, cpu_begin = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(seed, question) for seed, question in enumerate(batch)))
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    return Speed(len(batch) * num_tokens / seconds, cpu_seconds)


def drafted(engine: AsyncEngine) -> tuple[int, int]:
    """Tokens that were guessed so far, and of these the right ones."""
    stats = engine.get_stats()
    assert stats is not None
    return stats.num_draft_tokens, stats.num_accepted_tokens


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--task", choices=("rewrite", "chat", "lookup", "wrong"), default="rewrite")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--draft-model")
    options = parser.parse_args()
    if options.task == "lookup":
        time_lookups()
        return
    if options.task == "wrong":  # runs loops of its own
        await asyncio.to_thread(simulate_wrong)
        return
    speculation = SpeculationConfig(
        speculative_method="draft" if options.draft_model else "ngram",
        draft_model=options.draft_model,
    )
    off, on = (
        await start(options.model, SpeculationConfig()),
        await start(options.model, speculation),
    )
    texts, result = iter(questions(options.task)), {}
    temperature = 1.0 if options.task == "chat" else 0.0
    for engine in (off, on):
        await measure(engine, [next(texts)], 20, temperature)
    for streams in options.streams:
        rounds, before = [], drafted(on)
        for number in range(options.rounds):
            batch = [next(texts) for _ in range(streams)]
            order = [("off", off), ("on", on)][:: -1 if number % 2 else 1]
            rounds.append(
                {n: await measure(e, batch, options.tokens, temperature) for n, e in order}
            )
        found = {
            name: statistics.median(r[name].tokens_per_second for r in rounds)
            for name in ("off", "on")
        }
        ratios = [r["on"].tokens_per_second / r["off"].tokens_per_second for r in rounds]
        found["ratio"] = statistics.median(ratios)
        cpu = [r["on"].cpu_seconds / r["off"].cpu_seconds for r in rounds]
        found["cpu_ratio"] = statistics.median(cpu)
        num_drafts, num_right = (now - then for now, then in zip(drafted(on), before, strict=True))
        num_tokens = options.rounds * streams * options.tokens
        found["wrong_share"] = (num_drafts - num_right) / num_tokens
        result[streams] = {name: round(value, 3) for name, value in found.items()}
        print(
            f"{streams:3} streams: {found['off']:7.1f} tokens/s without, {found['on']:7.1f} "
            f"with, {found['ratio']:.2f} times; processor time {found['cpu_ratio']:.2f} "
            f"times ({' '.join(f'{ratio:.2f}' for ratio in ratios)};"
            f" {' '.join(f'{ratio:.2f}' for ratio in cpu)}); of {num_drafts} guessed tokens "
            f"{num_right} were right, of {num_tokens} in all",
            flush=True,
        )
    num_drafts, num_right = drafted(on)
    for engine in (off, on):
        await engine.__aexit__(None, None, None)
    accepted = round(num_right / max(num_drafts, 1), 2)
    print(json.dumps({"streams": result, "accepted": accepted}))


asyncio.run(main())
