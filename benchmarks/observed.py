"""What it costs to be looked at: a shadow policy, the page with live steps.

    python benchmarks/observed.py shadow [--seconds 8] [--rounds 3]
    python benchmarks/observed.py page [--streams 256] [--step-ms 20] [--seconds 4]
    python benchmarks/observed.py browser [--requests 1000]

`shadow`: the same load with a shadow policy and without, in turns: clients in a closed loop, with
prompts of 200 tokens, replies of 100. The shadow follows five seconds behind, so measuring begins
after that. Output tokens per second and gaps between tokens, the share of the event loop's time
that the shadow took (bounded by --shadow-max-share), and what a shadowed step cost.

`page`: the share of the event loop's time that records and frames take, by a clock around them, in
one process with a client that looks; with --step-ms 0 the event loop is all that limits the tokens.
`browser`: pictures a second of the page in a headless Chromium with many requests at once, by its
requestAnimationFrame. The last line is JSON.
"""

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from multiprocessing import get_context
from typing import Any

import aiohttp
import numpy as np
from harness import (
    ROOT,
    Args,
    Opt,
    Program,
    medians,
    percentile,
    ratio,
    serving,
    turns,
)

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.engine.live_feed import FeedObserver, LiveFeed
from aioserve.engine.operations import ShowSteps
from aioserve.lab.shadow import LAG_SECONDS

PROMPT_TOKENS, OUTPUT_TOKENS = 50, 400

program = Program(__doc__)


async def client(engine: AsyncEngine, number: int, tokens: int = OUTPUT_TOKENS) -> None:
    """Ask again as soon as it is answered."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    while True:
        async for _ in engine.generate([number % 90 + 5] * PROMPT_TOKENS, params):
            pass


@contextlib.asynccontextmanager
async def going(*work: Any) -> AsyncIterator[None]:
    """Coroutines that run in the block, and are cancelled at its end."""
    tasks = [asyncio.create_task(it) for it in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# A shadow policy.


class Load:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.num_tokens = 0
        self.gaps: list[float] = []
        self.is_measuring = False

    async def client(self, number: int) -> None:
        rng, clock = np.random.default_rng(number), asyncio.get_running_loop().time
        params = SamplingParams(max_tokens=100, ignore_eos=True, temperature=0)
        while True:
            prompt = rng.integers(16, self.engine.model_info.vocab_size, 200).tolist()
            last = None
            async for output in self.engine.generate(prompt, params):
                now = clock()
                if self.is_measuring:
                    self.num_tokens += len(output.token_ids)
                    if last is not None:
                        self.gaps.append(now - last)
                last = now


async def run_shadowed(config: EngineConfig, num_clients: int, seconds: float) -> dict[str, float]:
    """One engine's life: warm up, measure, close."""
    async with AsyncEngine(config) as engine:
        load = Load(engine)
        async with going(*(load.client(i) for i in range(num_clients))):
            await asyncio.sleep(LAG_SECONDS + 1)
            followed = engine.metrics.shadow.shadow
            shadow = None if followed is None else followed.stats
            before = (0.0, 0) if shadow is None else (shadow.cost_seconds, shadow.num_steps)
            load.is_measuring = True
            await asyncio.sleep(seconds)
            load.is_measuring = False
            result = {
                "tokens_per_second": load.num_tokens / seconds,
                "gap_p50_ms": 1e3 * percentile(load.gaps, 50),
                "gap_p99_ms": 1e3 * percentile(load.gaps, 99),
            }
            if shadow is not None:
                cost, steps = shadow.cost_seconds - before[0], shadow.num_steps - before[1]
                result["share"] = cost / seconds
                result["us_per_step"] = 1e6 * cost / max(steps, 1)
                result["resets"] = shadow.num_resets
    return result


@program.command(
    "shadow",
    clients=16,
    seconds=8.0,
    rounds=3,
    model=Opt("embedded", "or a directory"),
)
def shadow(args: Args) -> dict[str, Any]:
    """A shadow policy, beside none."""
    settings: list[tuple[str, Any]] = [("model.model", args.model)]
    configs = {
        "without": EngineConfig.load(None, settings),
        "with": EngineConfig.load(None, [*settings, ("shadow.shadow_policy", "hrrn")]),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in configs}
    for _, name in turns(list(configs), args.rounds):
        found[name].append(asyncio.run(run_shadowed(configs[name], args.clients, args.seconds)))
        numbers = found[name][-1].items()
        print(f"{name:8}", "  ".join(f"{k} {v:.4g}" for k, v in numbers), flush=True)
    ratios = {
        key: ratio(*([run[key] for run in found[name]] for name in ("with", "without")))
        for key in found["without"][0]
    }
    print("with / without:", "  ".join(f"{k} {v:.3f}" for k, v in ratios.items()))
    return {"medians": {name: medians(runs) for name, runs in found.items()}, "ratios": ratios}


# The page.


async def stream(session: aiohttp.ClientSession, url: str, number: int) -> None:
    """A client that asks again as soon as it is answered."""
    body = {
        "prompt": [number % 90 + 5] * PROMPT_TOKENS,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    while True:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for _ in response.content.iter_any():
                pass


def run_streams(url: str, count: int) -> None:
    """In a process of its own, until that is ended."""

    async def run() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
            await asyncio.gather(*(stream(session, url, i) for i in range(count)))

    asyncio.run(run())


class Stopwatch:
    """The time that calls of some methods took, and how many there were."""

    def __init__(self, owner: type, *names: str) -> None:
        self.seconds, self.calls = 0.0, 0
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - before
                self.calls += 1

        return timed


async def measure_share(streams: int, seconds: float, step_ms: float) -> dict[str, float]:
    heard = [name for name in vars(FeedObserver) if name.startswith("on_")]
    notes, frames = Stopwatch(FeedObserver, *heard), Stopwatch(LiveFeed, "_make_frame")
    config = EngineConfig.load(None, list(simulated_steps(streams, step_ms).items()))
    size = num_frames = 0
    async with AsyncEngine(config) as engine:

        async def look() -> None:
            nonlocal size, num_frames
            number = 0
            while True:
                seen = await engine.ask(ShowSteps(number))
                number = seen.number
                size += sum(map(len, seen.frames))
                num_frames += len(seen.frames)

        async with going(*(client(engine, i) for i in range(streams)), look()):
            await asyncio.sleep(2)
            notes.seconds = frames.seconds = 0.0
            frames.calls = size = num_frames = 0
            num_steps = steps_of(engine)
            before, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(seconds)
            wall, cpu = time.perf_counter() - before, time.thread_time() - cpu
            num_steps = steps_of(engine) - num_steps
        result = {
            "steps_per_second": round(num_steps / wall),
            "note_us_per_step": round(1e6 * notes.seconds / max(num_steps, 1), 1),
            "us_per_frame": round(1e6 * frames.seconds / max(frames.calls, 1)),
            "frames_per_second": round(num_frames / wall, 1),
            "kb_per_second": round(1e-3 * size / wall, 1),
            "share_of_time": round((notes.seconds + frames.seconds) / wall, 5),
            "share_of_cpu": round((notes.seconds + frames.seconds) / cpu, 5),
        }
    print("the loop: " + "  ".join(f"{name} {value}" for name, value in result.items()))
    return result


def steps_of(engine: AsyncEngine) -> int:
    """How many steps it has made."""
    stats = engine.get_stats()
    return 0 if stats is None else stats.num_steps


def simulated_steps(streams: int, step_ms: float) -> dict[str, object]:
    """Settings of an engine whose steps take as long, whatever is in them."""
    return {
        "runner.runner": "simulated",
        "runner.step_base_ms": step_ms,
        "runner.step_prefill_token_us": 0,
        "runner.step_decode_us": 0,
        "scheduler.max_num_seqs": streams,
        "cache.num_kv_blocks": 64 * streams,
    }


def words_of(settings: dict[str, object]) -> list[str]:
    """The command line of a server with these settings."""
    return [f"--set={name}={value}" for name, value in settings.items()]


@program.command("page", streams=256, seconds=4.0, step_ms=20.0)
async def page(args: Args) -> dict[str, Any]:
    """The time of the event loop that records and frames of the page take."""
    return await measure_share(args.streams, args.seconds, args.step_ms)


@program.command("browser", requests=Opt(1000, "at once"), seconds=4.0)
async def browser(args: Args) -> dict[str, object]:
    """Pictures a second of the page in a browser."""
    sys.path.insert(0, str(ROOT))
    from tests.page.browser import CHROMIUM, chromium

    if CHROMIUM is None:
        raise SystemExit("needs a browser: apt-get install chromium")
    settings = simulated_steps(7 * args.requests // 10, 20)  # the others wait
    code = """new Promise((resolve) => {
      const times = [];
      const next = (time) => {
        times.push(time);
        if (time - times[0] < %d) requestAnimationFrame(next);
        else resolve(times);
      };
      requestAnimationFrame(next);
    })"""
    async with AsyncExitStack() as stack:
        url = stack.enter_context(serving(*words_of(settings))).url
        chrome = await stack.enter_async_context(chromium())
        tab = await stack.enter_async_context(chrome.tab(url))
        await tab.shape(1360, 900)
        load = get_context("spawn").Process(
            target=run_streams, args=(url, args.requests), daemon=True
        )
        load.start()
        stack.callback(load.terminate)
        living = "[...aioserve.story.lives.values()].filter((life) => life.end === null).length"
        await tab.until(f"{living} > {0.9 * args.requests}")
        times = await tab.run(code % (1e3 * args.seconds))
        alive = await tab.run(living)
        frames = await tab.run("[aioserve.story.numFrames, aioserve.story.numSnapshots]")
    gaps = sorted(b - a for a, b in pairwise(times))
    result = {
        "requests": alive,
        "pictures_per_second": round(1e3 * len(gaps) / sum(gaps), 1),
        "slowest_ms": round(gaps[-1], 1),
        "p99_ms": round(gaps[int(0.99 * (len(gaps) - 1))], 1),
        "frames": frames[0],
        "snapshots": frames[1],
    }
    print("  ".join(f"{name} {value}" for name, value in result.items()))
    return result


if __name__ == "__main__":
    program.main()
