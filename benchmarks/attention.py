"""What one layer of paged attention costs, compiled and in plain torch.

    python benchmarks/attention.py [--threads 2] [--seconds 1] [--dtype float16]
    python benchmarks/attention.py --int8 --threads 1 --dtype bfloat16

Shape of a 135M model (9 heads, 3 KV heads of 64), shuffled blocks of 16 tokens. Layers
take turns, so that no cache holds a layer's K and V from one turn to the next. GB/s is K and V read
once, against the bandwidth of a plain sum over memory; GFLOP/s counts the products that causal
attention needs. Medians. The last line is JSON.

`--int8` compares a cache of int8 with one of the compute type: the two take turns, and the least
processor time of each counts.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aioserve.kernels import Kernels, usable_variants
from aioserve.runner.attention import AttentionOptions, KVCacheSpec, LayerSpec, StepInputs
from aioserve.runner.cpu.attention import AttentionBackend, CompiledAttention, TorchPagedAttention

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 9, 3, 64, 16
CACHE_BYTES = 200 << 20  # of all layers: more than the last level of cache
CASES = {  # rows, new tokens of each, context of each
    "decode 1 at 512": (1, 1, 512),
    "decode 1 at 8192": (1, 1, 8192),
    "decode 16 at 512": (16, 1, 512),
    "decode 16 at 2048": (16, 1, 2048),
    "decode 16 at 8192": (16, 1, 8192),
    "decode 64 at 512": (64, 1, 512),
    "decode 256 at 64": (256, 1, 64),
    "chunk 128 at 2048": (1, 128, 2048),
    "prefill 512": (1, 512, 512),
    "prefill 2048": (1, 2048, 2048),
}


def step_inputs(rows: int, tokens: int, context: int) -> StepInputs:
    width = -(-context // BLOCK_SIZE)
    table = np.random.default_rng(0).permutation(rows * width).astype(np.int32)
    table = table.reshape(rows, width)
    positions = np.arange(context - tokens, context)
    slots = table[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    everything = np.arange(rows * tokens)
    return StepInputs(
        req_ids=[str(row) for row in range(rows)],
        rows=np.arange(rows),
        input_ids=everything,
        positions=np.tile(positions, rows),
        slot_mapping=slots.reshape(-1).astype(np.int64),
        query_start_loc=np.arange(rows + 1) * tokens,
        seq_lens=np.full(rows, context),
        block_table=table,
        sampling=np.arange(rows),
        logits_indices=everything[tokens - 1 :: tokens],
    )


def median_seconds(call: Callable[[int], object], seconds: float) -> float:
    """Of `call(turn)`, after one warm-up."""
    call(0)
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        began = time.perf_counter()
        call(len(times))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def read_bandwidth(seconds: float) -> float:
    """Bytes per second of the fastest plain read that torch has: a sum over 512 MiB of floats."""
    data = torch.ones(128 << 20)
    return data.nbytes / median_seconds(lambda _: data.sum(), seconds)


class Layers:
    """A backend with so many layers that no cache holds them, at one step of one case."""

    def __init__(
        self,
        make: Callable[[KVCacheSpec, int, int], AttentionBackend],
        case: str,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        rows, tokens, context = CASES[case]
        blocks = rows * -(-context // BLOCK_SIZE)
        layer = LayerSpec(KV_HEADS, DIM, DIM)
        self.bytes = KVCacheSpec((layer,), kv_dtype).bytes_per_token * blocks * BLOCK_SIZE
        self._count = max(2, CACHE_BYTES // self.bytes)
        spec = KVCacheSpec((layer,) * self._count, kv_dtype)
        self._backend = make(spec, blocks, BLOCK_SIZE)
        for cache in (*self._backend.key_caches, *self._backend.value_caches):
            if kv_dtype is torch.int8:
                cache.random_(-127, 128)
                cache[..., DIM:] = torch.tensor([0.02]).view(torch.int8)
            else:
                cache.normal_()
        self._backend.prepare(step_inputs(rows, tokens, context))
        self._query = torch.randn(rows * tokens, HEADS, DIM, dtype=dtype)
        self._key, self._value = torch.randn(2, rows * tokens, KV_HEADS, DIM, dtype=dtype)

    def run(self, turn: int) -> None:
        """One layer, another one each turn."""
        options = AttentionOptions(DIM**-0.5)
        with torch.inference_mode():
            layer = turn % self._count
            self._backend.forward(layer, self._query, self._key, self._value, options)


def measure(
    make: Callable[[KVCacheSpec, int, int], AttentionBackend],
    case: str,
    dtype: torch.dtype,
    seconds: float,
) -> dict[str, float]:
    rows, tokens, context = CASES[case]
    layers = Layers(make, case, dtype, dtype)
    layer_bytes, taken = layers.bytes, median_seconds(layers.run, seconds)
    seen = rows * (tokens * context - tokens * (tokens - 1) // 2)  # pairs of query and key
    return {
        "ms": taken * 1e3,
        "gb_per_s": layer_bytes / taken / 1e9,
        "gflop_per_s": seen * HEADS * DIM * 4 / taken / 1e9,
    }


def compare_int8(kernels: Kernels, case: str, dtype: torch.dtype, turns: int = 60) -> None:
    """Print the least processor time of a layer with either cache."""

    def make(*shape: Any) -> AttentionBackend:
        return CompiledAttention(kernels, *shape)

    both = [Layers(make, case, dtype, kv_dtype) for kv_dtype in (dtype, torch.int8)]
    best = [math.inf, math.inf]
    for turn in range(turns):
        for number, layers in enumerate(both):
            began = time.process_time()
            layers.run(turn)
            best[number] = min(best[number], time.process_time() - began)
    plain, int8 = (seconds * 1e3 for seconds in best)
    print(
        f"{case:20}{kernels.variant:>12}{plain:9.3f} ms, int8 {int8:9.3f} ms, "
        f"{int8 / plain:.2f} times; bytes {both[1].bytes / both[0].bytes:.2f} times",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--backends", nargs="+", choices=["torch", *usable_variants()], default=None
    )
    parser.add_argument("--int8", action="store_true", help="against a cache of the compute type")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    if args.int8:
        for case in args.cases:
            for name in args.backends or usable_variants()[:1]:
                compare_int8(Kernels(name), case, dtype)
        return
    bandwidth = read_bandwidth(args.seconds)
    print(f"plain read: {bandwidth / 1e9:.1f} GB/s with {args.threads} threads")
    print(f"{'case':20}{'backend':>10}{'ms':>9}{'GB/s':>8}{'GFLOP/s':>9}")
    results: list[dict[str, Any]] = []
    for case in args.cases:
        for name in args.backends or [*usable_variants()[:1], "torch"]:
            if name == "torch":
                row = measure(TorchPagedAttention, case, dtype, args.seconds)
            else:
                kernels = Kernels(name)
                row = measure(
                    lambda *shape, kernels=kernels: CompiledAttention(kernels, *shape),
                    case,
                    dtype,
                    args.seconds,
                )
            print(
                f"{case:20}{name:>10}{row['ms']:9.3f}{row['gb_per_s']:8.1f}"
                f"{row['gflop_per_s']:9.0f}",
                flush=True,
            )
            results.append(
                {"case": case, "backend": name} | {k: round(v, 3) for k, v in row.items()}
            )
    print(
        json.dumps(
            {"dtype": args.dtype, "read_gb_per_s": round(bandwidth / 1e9, 2), "results": results}
        )
    )


if __name__ == "__main__":
    main()
