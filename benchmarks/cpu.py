"""How far the CPU runner is from what this machine can do, and where the rest goes.

    python benchmarks/cpu.py 135m                 # or 0.6b, 2m, or a model directory
    python benchmarks/cpu.py 135m --only steps --cases "decode 16 at 512,prefill 512"

(a) floors: bandwidth, and the model's matrix products by rows; (b) steps of the real runner, each
as a multiple of its floor; (c) the step by purpose; (d) the whole engine with 64 streams: what the
loop costs and how long it lets others wait. Medians, with half the distance between quartiles as
noise. The last line is JSON.
"""

import argparse
import asyncio
import json
from typing import Any

import torch
from breakdown import PYTHON, RULES, break_down
from floors import Floors, Shapes
from live import measure
from make_model import SHAPES, model_path
from steps import CASES, Case, StepBench, floor

from aioserve.config import ModelConfig
from aioserve.kernels import KernelsUnavailableError, load_kernels
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu import machine
from aioserve.runner.cpu.fused import CpuPlace
from aioserve.runner.cpu.memory import CPU_TYPES
from aioserve.runner.loader import named_dtype, num_weight_bytes

PARTS = ("floors", "steps", "breakdown", "engine")
FLOOR_ROWS = (1, 4, 16, 64, 512, 2048)
BROKEN_DOWN = (Case(1, 512), Case(16, 512), Case(64, 512), Case(0, 0, 512))
POOL_SHARE = 0.6  # of the free memory: the largest case that does not fit is skipped
WIDENING = ("baseline", "avx2", "avx512")  # kernels that compute in float32
MAX_DRIFT = 1.15  # more between a floor's first and last run: others used the machine. A guess.
PURPOSES = [*dict.fromkeys(purpose for purpose, _ in RULES), PYTHON]

Row = dict[str, Any]


def show_floors(floors: Floors, block_bytes: int) -> list[Row]:
    if block_bytes:
        print(
            f"weights in blocks: a step reads {block_bytes / 1e6:.0f} MB of them, at least "
            f"{1e3 * block_bytes / floors.bandwidth:.2f} ms; the floors are of unpacked ones"
        )
    print(
        f"read {floors.bandwidth / 1e9:.1f} GB/s, large products {floors.rate / 1e9:.0f} GFLOP/s, "
        f"KV {floors.shapes.kv_bytes_per_token / 1024:.1f} KiB a token"
    )
    print(f"\n{'rows':>6}{'products':>12}{'+-':>8}  ms, with as many logits up to 64, then 1")
    rows = []
    for number in FLOOR_ROWS:
        time = floors.linear(number, number if number <= 64 else 1)
        rows.append({"rows": number, "ms": 1e3 * time.median, "noise_ms": 1e3 * time.noise})
        print(f"{number:6}{rows[-1]['ms']:12.2f}{rows[-1]['noise_ms']:8.2f}", flush=True)
    return rows


def show_steps(bench: StepBench, cases: list[Case], floors: Floors, args: Any) -> list[Row]:
    print(
        f"\n{'step':30}{'ms':>10}{'+-':>8}{'floor':>10}{'= linear':>10}{'+ attn':>9}{'x floor':>9}"
    )
    rows = []
    for case in cases:
        linear, attention = (1e3 * part for part in floor(case, args.chunk, floors))
        time = bench.measure(case, args.chunk, args.seconds)
        row = {
            "case": case.name,
            "ms": 1e3 * time.median,
            "noise_ms": 1e3 * time.noise,
            "linear_floor_ms": linear,
            "attention_floor_ms": attention,
            "times_floor": 1e3 * time.median / (linear + attention),
        }
        rows.append(row)
        print(
            f"{case.name:30}{row['ms']:10.2f}{row['noise_ms']:8.2f}{linear + attention:10.2f}"
            f"{linear:10.2f}{attention:9.2f}{row['times_floor']:9.2f}",
            flush=True,
        )
    return rows


def show_breakdown(bench: StepBench, cases: list[Case], args: Any) -> list[Row]:
    heads = [purpose.split(",")[0].split(" ")[0] for purpose in PURPOSES]
    print(f"\n{'ms by purpose':26}{'profiled':>10}" + "".join(f"{head:>11}" for head in heads))
    rows = []
    for case in cases:
        parts = break_down(bench, case, args.chunk)
        row = {p: 1e3 * parts.get(p, 0.0) for p in PURPOSES}
        rows.append({"case": case.name} | row)
        values = "".join(f"{value:11.2f}" for value in row.values())
        print(f"{case.name:26}{sum(row.values()):10.2f}{values}", flush=True)
    return rows


def show_engine(args: Any) -> Row:
    found = asyncio.run(
        measure(
            model_path(args.model),
            threads=args.threads,
            streams=args.streams,
            input_tokens=128,
            output_tokens=64,
        )
    )
    print(f"\nengine, {args.streams} streams, 128 tokens in, 64 out")
    for name, value in found.items():
        print(f"  {name:28}{value:12.3f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", help=f"a directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--dtype", default="auto", help="as of python -m aioserve")
    parser.add_argument("--threads", type=int, help="default: one per physical core")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cases", help="names as printed, with commas between (default: all)")
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens in one step")
    parser.add_argument("--seconds", type=float, default=0.5, help="of repeats per case, at least")
    parser.add_argument("--streams", type=int, default=64, help="of the engine's part")
    args = parser.parse_args()
    threads = args.threads or machine.default_num_threads()
    torch.set_num_threads(threads)
    machine.keep_freed_memory()  # as the runner does; else floors pay for page faults
    path = model_path(args.model)
    info = ModelInfo(ModelConfig(model=str(path)))
    dtype = named_dtype(CPU_TYPES.resolve(ModelConfig(dtype=args.dtype)).dtype)
    shapes = Shapes.of(info.hf_config, dtype)
    names = args.cases and {name.strip() for name in args.cases.split(",")}
    if names and (unknown := names - {case.name for case in CASES}):
        parser.error(f"no case {unknown}; there are {', '.join(case.name for case in CASES)}")
    cases = [case for case in CASES if not names or case.name in names]

    try:
        variant = load_kernels().variant
    except KernelsUnavailableError:
        variant = "off"
    name = str(dtype).removeprefix("torch.")
    print(f"{args.model}: {name}, kernels {variant}, {threads} threads\n")
    result: Row = {"model": args.model, "dtype": name, "kernels": variant, "threads": threads}
    floors = None
    if {"floors", "steps"} & set(args.only):
        floors = Floors(shapes, dtype, is_widened=variant in WIDENING and dtype.itemsize == 2)
        result |= {"bandwidth_gb_s": floors.bandwidth / 1e9, "gflop_s": floors.rate / 1e9}
    if "floors" in args.only and floors:
        config = CPU_TYPES.resolve(ModelConfig(model=str(path), dtype=args.dtype))
        is_in_blocks = CpuPlace().multiplies_blocks and info.source.packs_embedding
        block_bytes = num_weight_bytes(config, info, CpuPlace()) if is_in_blocks else 0
        result |= {"floors": show_floors(floors, block_bytes), "block_bytes": block_bytes}
    if {"steps", "breakdown"} & set(args.only):
        fitting = _fitting(cases, info, shapes.kv_bytes_per_token)
        pool = max(case.num_kv_tokens for case in fitting)
        bench = StepBench(
            path,
            threads=args.threads,
            dtype=args.dtype,
            num_kv_tokens=pool,
            kv_bytes_per_token=shapes.kv_bytes_per_token,
        )
        if "steps" in args.only and floors:
            result["steps"] = show_steps(bench, fitting, floors, args)
            result["drift"] = floors.drift()
            if not 1 / MAX_DRIFT < result["drift"] < MAX_DRIFT:
                print(f"Not to be trusted: a floor now takes {result['drift']:.2f} times as long.")
        if "breakdown" in args.only:
            broken_down = [case for case in BROKEN_DOWN if case in fitting]
            result["breakdown"] = show_breakdown(bench, broken_down, args)
        bench.runner.close()
    if "engine" in args.only:
        result["engine"] = show_engine(args)
    print(json.dumps(result))


def _fitting(cases: list[Case], info: ModelInfo, bytes_per_token: int) -> list[Case]:
    """Those that the model's positions and this machine's memory allow; says which do not."""
    room = POOL_SHARE * machine.available_memory() / bytes_per_token
    found = []
    for case in cases:
        if max(case.context, case.prompt) + 200 > info.max_model_len:
            print(f"{case.name}: skipped, the model has {info.max_model_len} positions")
        elif case.num_kv_tokens > room:
            print(f"{case.name}: skipped, {case.num_kv_tokens} tokens of KV do not fit")
        else:
            found.append(case)
    return found


if __name__ == "__main__":
    main()
