"""What one layer of paged attention costs, compiled and in plain torch.

    python benchmarks/attention.py [--threads 2] [--seconds 1] [--dtype float16]

Shape of a 135M model (9 heads, 3 KV heads of 64), shuffled blocks of 16 tokens. Layers
take turns, so that no cache holds a layer's K and V from one turn to the next. GB/s is K and V read
once, against the bandwidth of a plain sum over memory; GFLOP/s counts the products that causal
attention needs. Medians. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from aioserve.kernels import Kernels, usable_variants
from aioserve.runner.attention import AttentionOptions, KVCacheSpec, LayerSpec, StepInputs
from aioserve.runner.cpu.attention import AttentionBackend, TorchPagedAttention
from aioserve.runner.cpu.compiled_attention import CompiledAttention

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


def measure(
    make: Callable[[KVCacheSpec, int, int], AttentionBackend],
    case: str,
    dtype: torch.dtype,
    seconds: float,
) -> dict[str, float]:
    rows, tokens, context = CASES[case]
    blocks = rows * -(-context // BLOCK_SIZE)
    layer = LayerSpec(KV_HEADS, DIM, DIM)
    layer_bytes = KVCacheSpec((layer,), dtype).bytes_per_token * blocks * BLOCK_SIZE
    num_layers = max(2, CACHE_BYTES // layer_bytes)
    backend = make(KVCacheSpec((layer,) * num_layers, dtype), blocks, BLOCK_SIZE)
    for cache in (*backend.key_caches, *backend.value_caches):  # type: ignore[attr-defined]
        cache.normal_()
    backend.prepare(step_inputs(rows, tokens, context))
    query = torch.randn(rows * tokens, HEADS, DIM, dtype=dtype)
    key, value = torch.randn(2, rows * tokens, KV_HEADS, DIM, dtype=dtype)
    options = AttentionOptions(DIM**-0.5)
    with torch.inference_mode():
        taken = median_seconds(
            lambda turn: backend.forward(turn % num_layers, query, key, value, options),
            seconds,
        )
    seen = rows * (tokens * context - tokens * (tokens - 1) // 2)  # pairs of query and key
    return {
        "ms": taken * 1e3,
        "gb_per_s": layer_bytes / taken / 1e9,
        "gflop_per_s": seen * HEADS * DIM * 4 / taken / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--backends", nargs="+", choices=["torch", *usable_variants()], default=None
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
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
