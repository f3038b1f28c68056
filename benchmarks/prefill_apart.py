"""What prefill apart from decode is worth: two simulated engines, two ways to share their work.

    python benchmarks/prefill_apart.py --profile h200-llama-8b-roofline --rate 4 8 12

Side by side: requests go to one and the other in turn. Apart: each prompt is computed by the first,
which hands its blocks over through a directory, and the reply is made by the second. One virtual
time, the same requests. The last line is JSON.
"""

import argparse
import asyncio
import json
import random
import sys
from typing import Any, NamedTuple

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.lab.simulation.run import VirtualClockEventLoop
from aioserve.model_source.info import ModelInfo
from aioserve.runner.simulated import SimulatedRunner

MAX_MODEL_LEN = 16_384


class Ask(NamedTuple):
    """One request."""

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


def make_config(args: argparse.Namespace, role: str | None) -> EngineConfig:
    cache = {"num_kv_blocks": args.blocks}
    if role is not None:
        cache |= {"kv_connector": "disk", "kv_role": role, "kv_connector_gib": 64.0}
    return EngineConfig(
        model=ModelConfig(max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=True),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(policy="chunked_prefill", options={"chunk_size": args.chunk}),
        runner=RunnerConfig(
            runner="simulated",
            profile=args.profile,
            step_kv_load_token_us=1e6 * args.token_bytes / (args.copy_gbs * 1e9),
            step_kv_read_token_us=1e6 * args.token_bytes / (args.read_gbs * 1e9),
            simulated_kv_token_bytes=args.token_bytes,
        ),
    )


async def run(args: argparse.Namespace, asks: list[Ask], is_apart: bool) -> dict[str, float]:
    """Send all of it; latencies in milliseconds."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockEventLoop)
    engines, directory = [], None
    for role in ("producer", "consumer") if is_apart else (None, None):
        config = make_config(args, role)
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
        "ttft_p50": round(1e3 * quantile(ttfts, 0.5), 1),
        "ttft_p99": round(1e3 * quantile(ttfts, 0.99), 1),
        "gap_p50": round(1e3 * quantile(gaps, 0.5), 2),
        "gap_p99": round(1e3 * quantile(gaps, 0.99), 2),
        "output_tokens_per_s": round(num_tokens / seconds),
    }


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def main() -> int:
    """Print a row per rate and way, and the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="h200-llama-8b-roofline", help="step times")
    parser.add_argument("--rate", type=float, nargs="+", default=[4, 8, 12], help="requests/s")
    parser.add_argument("--count", type=int, default=300, help="requests")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step")
    parser.add_argument("--blocks", type=int, default=30_000, help="KV blocks of each engine")
    parser.add_argument("--token-bytes", type=int, default=131_072, help="K and V of a token")
    parser.add_argument("--read-gbs", type=float, default=4.0, help="of the directory, GB/s")
    parser.add_argument("--copy-gbs", type=float, default=40.0, help="to and from the cache, GB/s")
    args = parser.parse_args()
    names = ("ttft_p50", "ttft_p99", "gap_p50", "gap_p99", "output_tokens_per_s")
    print(f"{'rate':>5} {'':14}" + "".join(f"{name:>21}" for name in names))
    rows: list[dict[str, Any]] = []
    for rate in args.rate:
        asks = make_requests(rate, args.count)
        for is_apart in (False, True):
            with asyncio.Runner(loop_factory=VirtualClockEventLoop) as runner:
                found = runner.run(run(args, asks, is_apart))
            way = "apart" if is_apart else "side by side"
            print(f"{rate:5} {way:14}" + "".join(f"{found[name]:21}" for name in names))
            rows.append({"rate": rate, "way": way, **found})
    print(json.dumps({"settings": vars(args), "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
