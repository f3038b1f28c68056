"""What kernels cost: a model's matrix products, quantized ones, the head, attention, in turns.

    python benchmarks/kernel_costs.py products 135m             # or 0.6b, 2m, or a model directory
    python benchmarks/kernel_costs.py quantized [amx_bf16]      # all variants that this CPU runs
    python benchmarks/kernel_costs.py quantized --head          # the product of the head
    python benchmarks/kernel_costs.py attention [--threads 2]
    python benchmarks/kernel_costs.py attention --int8 --threads 1

`products`: the library is oneDNN on weights that it has packed, as in the floors of `steps.py`;
both multiply in bfloat16, by one weight of each shape that the model has, which stay in the
last-level cache. The least processor time of some turns, so on one thread values count beside other
work as well.

`quantized`: products with quantized weights, with exact activations and with those of int8
(`--activations int8`), and oneDNN's bfloat16 on its own layout, beside the same weights unpacked to
bfloat16. Six layers' matrices of SmolLM2-135M, one thread; the least processor time.

`attention`: one layer of paged attention, compiled and in plain torch. Shape of a 135M model (9
heads, 3 KV heads of 64), shuffled blocks of 16 tokens. Layers take turns, so that no cache holds a
layer's K and V from one turn to the next. GB/s is K and V read once, against the bandwidth of a
plain sum over memory; GFLOP/s counts the products that causal attention needs. Medians. `--int8`
compares a cache of int8 with one of the compute type, with its codes as floats and in products of
bytes (`--activations int8`): the least processor time of each.

The last line is JSON.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import Args, Opt, Program, Table, by_turns, samples, timed
from make_model import MODEL, model_path
from steps import Shapes, packed_product
from torch import Tensor

from aioserve.config import ModelConfig
from aioserve.features.quantized import quantize
from aioserve.kernels import Kernels, load_kernels, usable_variants
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.backend import AttentionOptions, KVCacheSpec, LayerSpec, StepInputs
from aioserve.runner.cpu.attention import CompiledAttention
from aioserve.runner.cpu.kv_memory import AttentionBackend
from aioserve.runner.cpu.onednn import pack_linear
from aioserve.runner.cpu.products import BlockLinear, PanelLinear
from aioserve.runner.cpu.torch_attention import TorchPagedAttention

DTYPE = torch.bfloat16
ROWS = (64, 256, 512, 2048, 4096)  # fewer would read from memory in a model, not here
ROWS_IN_A_TURN = 1024  # few rows are multiplied again and again, until a turn has this many

LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # (outputs, inputs)
LAYERS = 6
HEAD = (49152, 576)
KINDS = ("Q4_0", "Q8_0")

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 9, 3, 64, 16
MIN_SECONDS = 0.5  # of each measurement of attention
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
    "chunk 512 at 8192": (1, 512, 8192),
    "prefill 2048": (1, 2048, 2048),
}


Linear = Callable[[Tensor], Tensor]

program = Program(__doc__)


def multiply(products: Sequence[Linear], inputs: Sequence[Tensor], repeats: int = 1) -> None:
    """All of the products, `repeats` times."""
    for _ in range(repeats):
        for run, x in zip(products, inputs, strict=True):
            run(x)


@program.command(
    "products",
    MODEL,
    threads=1,
    turns=12,
)
@torch.inference_mode()
def products(args: Args) -> dict[str, Any]:
    """The matrix products of a model's layers: the library's and our kernels'."""
    torch.set_num_threads(args.threads)
    info = ModelInfo(ModelConfig(model=str(model_path(args.model))))
    all_shapes = Shapes.of(info.hf_config, DTYPE).products
    shapes = list(dict.fromkeys(all_shapes))
    layers = len(all_shapes) / len(shapes)
    kernels = load_kernels()
    weights = [torch.randn(shape, dtype=DTYPE) for shape in shapes]
    sides: dict[str, list[Linear]] = {
        "library": [packed_product(weight).run for weight in weights],
        "ours": [PanelLinear.of(kernels, weight, None) for weight in weights],
    }
    columns = {"rows": "6", "library": "10.2f", "ours": "10.2f", "ratio": "8.2f"}
    table = Table(columns, f"ms of all layers, {kernels.variant}")
    for rows in ROWS:
        inputs = [torch.randn(rows, shape[1], dtype=DTYPE) for shape in shapes]
        repeats = max(1, ROWS_IN_A_TURN // rows)
        runs = {name: partial(multiply, side, inputs, repeats) for name, side in sides.items()}
        seconds = by_turns(runs, args.turns + 1)  # the first warms up
        row = {name: 1e3 * layers * min(own[1:]) / repeats for name, own in seconds.items()}
        table.add({"rows": rows, **row, "ratio": row["ours"] / row["library"]})
    return {"threads": args.threads, "rows": table.rows}


def quantized_product(kernels: Kernels, weight: Tensor, kind: str, *, is_int8: bool) -> BlockLinear:
    """A product with a weight in the format `kind`, and with rows of int8 or exact ones."""
    linear = BlockLinear.of(kernels, [quantize(weight, kind)], None, DTYPE)
    if is_int8:
        linear.quantize_rows()
    return linear


@program.command(
    "quantized",
    {"variants": Opt(usable_variants(), "of the kernels")},
    repeats=12,
    head=Opt(False, "the head's matrix, not six layers'"),
)
def quantized(args: Args) -> dict[str, Any]:
    """Products with quantized weights, as times of those in bfloat16."""
    torch.set_num_threads(1)
    names = [name for kind in KINDS for name in (kind, f"{kind}, int8")]
    heads = {"kernels": "<12", "rows": "6", **dict.fromkeys([*names, "oneDNN"], "14.2f")}
    table = Table({**heads, "bfloat16, ms": "14.2f"})
    for variant in args.variants:
        kernels = Kernels(variant)
        weights = [torch.randn(shape) / 8 for shape in ([HEAD] if args.head else LAYER * LAYERS)]
        kinds: dict[str, Sequence[Linear]] = {}
        for kind in KINDS:
            for name, is_int8 in ((kind, False), (f"{kind}, int8", True)):
                kinds[name] = [
                    quantized_product(kernels, weight, kind, is_int8=is_int8) for weight in weights
                ]
        kinds["oneDNN"] = [pack_linear(weight.to(DTYPE), None) for weight in weights]
        kinds["bfloat16"] = [PanelLinear.of(kernels, weight.to(DTYPE), None) for weight in weights]
        for rows in (1, 4, 8, 13, 16, 64, 256, 512):
            inputs = [torch.randn(rows, weight.shape[1]).to(DTYPE) for weight in weights]
            runs = {kind: partial(multiply, products, inputs) for kind, products in kinds.items()}
            seconds = by_turns(runs, args.repeats, time.thread_time)
            whole = min(seconds["bfloat16"])
            ratios = {kind: min(own) / whole for kind, own in seconds.items()}
            table.add({"kernels": variant, "rows": rows, **ratios, "bfloat16, ms": 1e3 * whole})
    return {"rows": table.rows}


# Attention.


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


class Layers:
    """A backend whose layers are too many for any cache, at one step of one case."""

    def __init__(
        self,
        make: Callable[[KVCacheSpec, int, int], AttentionBackend],
        case: str,
        kv_dtype: torch.dtype,
    ) -> None:
        rows, tokens, context = CASES[case]
        blocks = rows * -(-context // BLOCK_SIZE)
        layer = LayerSpec(KV_HEADS, DIM, DIM)
        self.bytes = KVCacheSpec((layer,), kv_dtype).bytes_per_token * blocks * BLOCK_SIZE
        self._count = max(2, CACHE_BYTES // self.bytes)
        spec = KVCacheSpec((layer,) * self._count, kv_dtype)
        self._turn = 0
        self._backend = make(spec, blocks, BLOCK_SIZE)
        for cache in (*self._backend.key_caches, *self._backend.value_caches):
            if kv_dtype is torch.int8:
                cache.random_(-127, 128)
                cache[..., DIM:] = torch.tensor([0.02]).view(torch.int8)
            else:
                cache.normal_()
        self._backend.prepare(step_inputs(rows, tokens, context))
        self._query = torch.randn(rows * tokens, HEADS, DIM, dtype=DTYPE)
        self._key, self._value = torch.randn(2, rows * tokens, KV_HEADS, DIM, dtype=DTYPE)

    def run(self) -> None:
        """One layer, another one each turn."""
        self._turn += 1
        options = AttentionOptions(DIM**-0.5)
        with torch.inference_mode():
            layer = self._turn % self._count
            self._backend.forward(layer, self._query, self._key, self._value, options)


def make_backend(
    name: str, *, in_bytes: bool = False
) -> Callable[[KVCacheSpec, int, int], AttentionBackend]:
    """What makes the backend of a variant of the kernels, or of torch."""
    if name == "torch":
        return TorchPagedAttention
    return partial(CompiledAttention, Kernels(name), in_bytes=in_bytes)


@program.command(
    "attention",
    threads=2,
    cases=Opt(list(CASES), choices=CASES),
    int8=Opt(False, "against a cache of the compute type"),
    turns=Opt(60, "with --int8"),
)
def attention(args: Args) -> dict[str, Any]:
    """One layer of paged attention."""
    torch.set_num_threads(args.threads)
    best = usable_variants()[0]
    heads = {"case": "<20", "backend": "12", "ms": "9.3f"}
    if args.int8:
        ways = ("int8 cache", "products of bytes", "memory")
        table = Table({**heads, **{way: f"{len(way) + 2}.2f" for way in ways}})
        for case in args.cases:
            plain = Layers(make_backend(best), case, DTYPE)
            others = {
                "int8 cache": Layers(make_backend(best), case, torch.int8),
                "products of bytes": Layers(make_backend(best, in_bytes=True), case, torch.int8),
            }
            runs = {way: own.run for way, own in others.items()} | {"plain": plain.run}
            least = {way: min(own) for way, own in by_turns(runs, args.turns).items()}
            row = {"memory": others["int8 cache"].bytes / plain.bytes, "ms": 1e3 * least["plain"]}
            row |= {way: least[way] / least["plain"] for way in others}
            table.add({"case": case, "backend": best, **row})
        return {"rows": table.rows}
    data = torch.ones(128 << 20)
    read = data.nbytes / timed(data.sum, 5, MIN_SECONDS).median / 1e9
    print(f"plain read: {read:.1f} GB/s with {args.threads} threads")
    table = Table({**heads, "GB/s": "8.1f", "GFLOP/s": "9.0f"})
    for case in args.cases:
        rows, tokens, context = CASES[case]
        for name in (best, "torch"):
            layers = Layers(make_backend(name), case, DTYPE)
            layers.run()
            taken = float(np.median(samples(layers.run, 5, MIN_SECONDS)))
            seen = rows * (tokens * context - tokens * (tokens - 1) // 2)  # pairs of query and key
            row = {"ms": 1e3 * taken, "GB/s": layers.bytes / taken / 1e9}
            row["GFLOP/s"] = seen * HEADS * DIM * 4 / taken / 1e9
            table.add({"case": case, "backend": name, **row})
    return {"read_gb_per_s": read, "rows": table.rows}


if __name__ == "__main__":
    program.main()
