"""Steps of a model with quantized weights, beside those of the same model in bfloat16.

    python benchmarks/quantized.py 135m                   # or 0.6b, 2m, or a model directory
    python benchmarks/quantized.py 135m --activations int8  # of the quantized ones
    AIOSERVE_KERNELS=avx2 python benchmarks/quantized.py 135m --cases "decode 16 at 512"

All are loaded, and each case runs on them by turns: the lower quartile of their steps counts, as
others may use the machine meanwhile. Whole steps: weights come from memory, unlike in blocks.py.
The last line is JSON.
"""

import argparse
import json
import statistics
import time

import torch
from floors import Shapes, samples
from make_model import SHAPES, model_path
from steps import Case, StepBench

from aioserve.config import ModelConfig
from aioserve.kernels import load_kernels
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu import machine

KINDS = (None, "int4", "int8")  # of --quantization
CASES = (
    *(Case(decodes, 128) for decodes in (1, 4, 16, 64)),
    *(Case(decodes, 512) for decodes in (16, 64)),
    *(Case(0, 0, prompt) for prompt in (256, 2048)),
)
STEPS = 4  # of a case at a time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", help=f"a directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--threads", type=int, help="default: one per physical core")
    parser.add_argument("--activations", choices=["int8"], help="default: exact")
    parser.add_argument("--cases", help="names as printed, with commas between (default: all)")
    parser.add_argument(
        "--cpu-time", action="store_true", help="seconds of CPU on one thread: beside other work"
    )
    parser.add_argument("--rounds", type=int, default=8, help="of all kinds, by turns")
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens in one step")
    args = parser.parse_args()
    threads = 1 if args.cpu_time else args.threads or machine.default_num_threads()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(threads)
    names = args.cases and {name.strip() for name in args.cases.split(",")}
    cases = [case for case in CASES if not names or case.name in names]
    path = model_path(args.model)
    shapes = Shapes.of(ModelInfo(ModelConfig(model=str(path))).hf_config, torch.bfloat16)
    benches = [
        StepBench(
            path,
            threads=threads,
            dtype="bfloat16",
            quantization=kind,
            activations=args.activations if kind else None,
            num_kv_tokens=max(case.num_kv_tokens for case in cases),
            kv_bytes_per_token=shapes.kv_bytes_per_token,
        )
        for kind in KINDS
    ]
    variant = load_kernels().variant
    precision = f"{args.activations or 'exact'} activations"
    print(f"{args.model}, kernels {variant}, {threads} threads, {precision} of quantized weights")
    print(f"{'step':24}{'bfloat16, ms':>14}" + "".join(f"{kind:>9}" for kind in KINDS[1:]))
    found = {}
    for case in cases:
        seconds: list[list[float]] = [[] for _ in KINDS]
        for _ in range(args.rounds):
            for own, bench in zip(seconds, benches, strict=True):
                steps = bench.begin(case, args.chunk)
                steps.step()
                own += samples(steps.step, STEPS, 0.0, clock=clock)
                steps.end()
        plain, *rest = (statistics.quantiles(own, n=4)[0] for own in seconds)
        found[case.name] = {"ms": 1e3 * plain} | {
            str(kind): value / plain for kind, value in zip(KINDS[1:], rest, strict=True)
        }
        print(f"{case.name:24}{1e3 * plain:14.2f}" + "".join(f"{v / plain:9.2f}" for v in rest))
    for bench in benches:
        bench.runner.close()
    about = {"model": args.model, "kernels": variant, "threads": threads}
    print(json.dumps(about | {"activations": args.activations, "steps": found}))


if __name__ == "__main__":
    main()
