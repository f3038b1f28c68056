"""Steps of hybrids with `--quantization` beside the same without, and the memory of both.

    python benchmarks/quantized_hybrids.py [--models qwen3_5_text lfm2] [--activations int8]
    python benchmarks/quantized_hybrids.py --memory

The models of `hybrids.py`, in bfloat16, on one thread. Each kind of step takes turns: the ratio of
the least processor times. `--memory` instead says what a process has more of its own after the load
(RssAnon of /proc/self/status), each in a process of its own.
"""

import argparse
import gc
import math
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parent))

from hybrids import DECODES, MODELS, PROMPTS, Bench

Way = Literal["int8", "int4"] | None

WAYS: tuple[Way, ...] = (None, "int8", "int4")


def own_bytes() -> int:
    """Bytes of memory that this process shares with no file."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux"
    return int(found[1]) * 1024


def megabytes(model: str, way: Way) -> int:
    """What a process that serves a model has, once it has read it."""
    command = [sys.executable, __file__, "--models", model, "--load", str(way)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(told.split()[-1])


def ratios(benches: dict[Way, Bench], step: str, repeats: int) -> dict[Way, float]:
    """The least processor time of a step of each, to that of the weights as they are."""
    best = dict.fromkeys(benches, math.inf)
    for _ in range(repeats):
        for way, bench in benches.items():
            run = partial(bench.prompt, PROMPTS[0]) if step.startswith("prompt") else bench.decode
            began = time.process_time()
            run()
            best[way] = min(best[way], time.process_time() - began)
    return {way: seconds / best[None] for way, seconds in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--activations", choices=["int8"])
    parser.add_argument("--repeats", type=int, default=30, help="of a decode; a fifth of a prompt")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load is not None:
        import aioserve.runner.cpu.models  # noqa: F401 - what the imports take is not the model's

        before = own_bytes()
        way = next(way for way in WAYS if str(way) == args.load)
        bench = Bench(args.models[0], "bfloat16", 1, way)
        gc.collect()
        print((own_bytes() - before) // 10**6)
        bench.close()
        return
    for model in args.models:
        if args.memory:
            sizes = [megabytes(model, way) for way in WAYS]
            print(f"{model}: {sizes[0]} MB as it is, {sizes[1]} int8, {sizes[2]} int4", flush=True)
            continue
        print(model, flush=True)
        benches = {
            way: Bench(model, "bfloat16", 1, way, args.activations if way else None) for way in WAYS
        }
        for step in (*(f"decode {n}" for n in DECODES), f"prompt {PROMPTS[0]}"):
            if step.startswith("decode"):
                for bench in benches.values():
                    bench.begin(int(step.split()[1]))
            repeats = args.repeats // 5 if step.startswith("prompt") else args.repeats
            found = ratios(benches, step, repeats)
            print(f"  {step}: int8 {found['int8']:.2f}, int4 {found['int4']:.2f}", flush=True)
        for bench in benches.values():
            bench.close()


if __name__ == "__main__":
    main()
