"""What the page costs the server while somebody looks, and how smoothly a browser draws it.

    python benchmarks/page.py [--streams 256] [--step-ms 20] [--seconds 4] [--rounds 5]
    python benchmarks/page.py --browser [--requests 1000]

First the share of the event loop's time that notes and frames take, by a clock around them, in one
process: streams in a closed loop on the simulated runner, and somebody who looks.

Then a server in a process of its own, and the same streams over HTTP from another. In turns nobody
looks at GET /watch/steps, and so many do: tokens per second, and the CPU time of the server's
process per token, as ratios of neighbouring turns. That needs a machine with nothing else to do,
and cores for all: with --step-ms 0 the event loop is all that limits the tokens.

With --browser: pictures a second of the page in a headless Chromium with so many requests at once,
by its requestAnimationFrame. The last line is JSON.
"""

import argparse
import asyncio
import functools
import json
import os
import re
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.engine.live_feed import AWAY_SECONDS, FeedObserver, LiveFeed
from aioserve.engine.operations import ShowSteps

ROOT = Path(__file__).parents[1]
TICK = 1 / os.sysconf("SC_CLK_TCK")
PROMPT_TOKENS, OUTPUT_TOKENS = 50, 400


async def stream(session: aiohttp.ClientSession, url: str, number: int, again: bool) -> None:
    """A client that asks again as soon as it is answered, or once."""
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
        if not again:
            return


def run_streams(url: str, count: int) -> None:
    """In a process of its own, until that is ended."""

    async def run() -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
            await asyncio.gather(*(stream(session, url, i, True) for i in range(count)))

    asyncio.run(run())


def run_looker(url: str) -> None:
    """Reads the stream of steps, and does nothing with it: a browser has a core of its own."""

    async def run() -> None:
        async with (
            aiohttp.ClientSession(read_bufsize=2**22) as session,
            session.get(f"{url}/watch/steps", timeout=aiohttp.ClientTimeout()) as response,
        ):
            response.raise_for_status()
            async for _ in response.content.iter_any():
                pass

    asyncio.run(run())


@asynccontextmanager
async def server(settings: dict[str, object]) -> AsyncIterator[tuple[str, int]]:
    """Its address, and the id of its process."""
    words = [f"--set={name}={value}" for name, value in settings.items()]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "aioserve", "--port", "0", *words),
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        assert process.stderr is not None
        log = ""
        while (found := re.search(r"listening on (http://\S+)", log)) is None:
            line = await process.stderr.readline()
            if not line:
                raise SystemExit(f"the server has ended: {log}")
            log += line.decode()
        drain = asyncio.create_task(process.stderr.read())
        yield found[1], process.pid
    finally:
        process.terminate()
        await process.wait()
    await drain


class Reading:
    """Tokens, CPU seconds of the server, and seconds, at a moment."""

    def __init__(self, tokens: float, cpu: float, now: float) -> None:
        self.tokens, self.cpu, self.now = tokens, cpu, now

    @classmethod
    async def take(cls, session: aiohttp.ClientSession, url: str, pid: int) -> "Reading":
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
        found = re.search(r"^aioserve_generation_tokens_total (\S+)$", text, re.MULTILINE)
        assert found is not None
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # noqa: ASYNC240
        return cls(float(found[1]), TICK * (int(stat[11]) + int(stat[12])), time.perf_counter())

    def since(self, before: "Reading") -> tuple[float, float]:
        """Tokens per second, and microseconds of CPU per token."""
        tokens = self.tokens - before.tokens
        cpu = self.cpu - before.cpu
        return tokens / (self.now - before.now), 1e6 * cpu / max(tokens, 1)


class Stopwatch:
    """The time that calls of a method took, and how many there were."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds, self.calls = 0.0, 0
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - before
                self.calls += 1

        setattr(owner, name, timed)


async def measure_share(streams: int, seconds: float, step_ms: float) -> dict[str, object]:
    notes, frames = Stopwatch(FeedObserver, "_try"), Stopwatch(LiveFeed, "_make_frame")
    config = EngineConfig.load(None, list(simulated(streams, step_ms).items()))
    size = num_frames = 0
    async with AsyncEngine(config) as engine:

        async def client(number: int) -> None:
            params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            while True:
                async for _ in engine.generate([number % 90 + 5] * PROMPT_TOKENS, params):
                    pass

        async def look() -> None:
            nonlocal size, num_frames
            number = 0
            while True:
                seen = await engine.ask(ShowSteps(number))
                number = seen.number
                size += sum(map(len, seen.frames))
                num_frames += len(seen.frames)

        tasks = [asyncio.create_task(client(i)) for i in range(streams)]
        tasks.append(asyncio.create_task(look()))
        await asyncio.sleep(2)
        notes.seconds = frames.seconds = 0.0
        notes.calls = frames.calls = size = num_frames = 0
        stats = engine.get_stats()
        num_steps = 0 if stats is None else stats.num_steps
        before, cpu = time.perf_counter(), time.thread_time()
        await asyncio.sleep(seconds)
        wall, cpu = time.perf_counter() - before, time.thread_time() - cpu
        stats = engine.get_stats()
        num_steps = (0 if stats is None else stats.num_steps) - num_steps
        result = {
            "steps_per_second": round(num_steps / wall),
            "note_us_per_step": round(1e6 * notes.seconds / max(num_steps, 1), 1),
            "us_per_frame": round(1e6 * frames.seconds / max(frames.calls, 1)),
            "frames_per_second": round(num_frames / wall, 1),
            "kb_per_second": round(1e-3 * size / wall, 1),
            "share_of_time": round((notes.seconds + frames.seconds) / wall, 5),
            "share_of_cpu": round((notes.seconds + frames.seconds) / cpu, 5),
        }
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    print("the loop: " + "  ".join(f"{name} {value}" for name, value in result.items()))
    return {"streams": streams, "step_ms": step_ms, **result}


def simulated(streams: int, step_ms: float) -> dict[str, object]:
    return {
        "runner.runner": "simulated",
        "runner.step_base_ms": step_ms,
        "runner.step_prefill_token_us": 0,
        "runner.step_decode_us": 0,
        "scheduler.max_num_seqs": streams,
        "cache.num_kv_blocks": 64 * streams,
    }


async def measure_cost(
    streams: int, lookers: int, seconds: float, rounds: int, step_ms: float
) -> dict[str, object]:
    settings = simulated(streams, step_ms)
    spawn = get_context("spawn")
    speeds: list[float] = []
    costs: list[float] = []
    plain: list[float] = []
    async with AsyncExitStack() as stack:
        url, pid = await stack.enter_async_context(server(settings))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        load = spawn.Process(target=run_streams, args=(url, streams), daemon=True)
        load.start()
        stack.callback(load.terminate)
        await asyncio.sleep(4)

        async def turn(count: int) -> tuple[float, float]:
            looking: list[BaseProcess] = [
                spawn.Process(target=run_looker, args=(url,), daemon=True) for _ in range(count)
            ]
            for process in looking:
                process.start()
            await asyncio.sleep(AWAY_SECONDS + 1)  # until they look, or those before are forgotten
            before = await Reading.take(session, url, pid)
            await asyncio.sleep(seconds)
            result = (await Reading.take(session, url, pid)).since(before)
            for process in looking:
                process.terminate()
                process.join()
            return result

        for number in range(rounds):
            order = (0, lookers) if number % 2 == 0 else (lookers, 0)
            found = {count: await turn(count) for count in order}
            speeds.append(found[lookers][0] / found[0][0])
            costs.append(found[lookers][1] / found[0][1])
            plain.append(found[0][0])
            print(
                f"tokens/s {found[0][0]:9.0f} alone, {found[lookers][0]:9.0f} looked at: "
                f"{speeds[-1]:.3f}; CPU per token {found[0][1]:.2f} us, "
                f"{found[lookers][1]:.2f} us: {costs[-1]:.3f}",
                flush=True,
            )
    return {
        "streams": streams,
        "lookers": lookers,
        "step_ms": step_ms,
        "tokens_per_second": round(statistics.median(plain)),
        "tokens_ratio": round(statistics.median(speeds), 4),
        "tokens_ratios": [round(ratio, 4) for ratio in speeds],
        "cpu_ratio": round(statistics.median(costs), 4),
        "cpu_ratios": [round(ratio, 4) for ratio in costs],
    }


async def measure_pictures(requests: int, seconds: float) -> dict[str, object]:
    sys.path.insert(0, str(ROOT))
    from tests.page.browser import CHROMIUM, chromium

    if CHROMIUM is None:
        raise SystemExit("needs a browser: apt-get install chromium")
    settings = simulated(7 * requests // 10, 20)  # the others wait
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
        url, _ = await stack.enter_async_context(server(settings))
        browser = await stack.enter_async_context(chromium())
        tab = await stack.enter_async_context(browser.tab(url))
        await tab.shape(1360, 900)
        load = get_context("spawn").Process(target=run_streams, args=(url, requests), daemon=True)
        load.start()
        stack.callback(load.terminate)
        living = "[...aioserve.story.lives.values()].filter((life) => life.end === null).length"
        await tab.until(f"{living} > {0.9 * requests}")
        times = await tab.run(code % (1e3 * seconds))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--lookers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a step takes")
    parser.add_argument("--browser", action="store_true", help="pictures a second instead")
    parser.add_argument("--requests", type=int, default=1000, help="at once, with --browser")
    args = parser.parse_args()
    if args.browser:
        result = asyncio.run(measure_pictures(args.requests, args.seconds))
    else:
        result = {
            "loop": asyncio.run(measure_share(args.streams, args.seconds, args.step_ms)),
            "server": asyncio.run(
                measure_cost(args.streams, args.lookers, args.seconds, args.rounds, args.step_ms)
            ),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
