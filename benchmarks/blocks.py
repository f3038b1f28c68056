"""Products with quantized weights, beside the same weights unpacked to bfloat16.

    python benchmarks/blocks.py                        # all variants that this CPU runs
    python benchmarks/blocks.py amx_bf16 --repeats 30
    python benchmarks/blocks.py --head                 # the product of the head

Each with exact activations and with those of int8 (`--activations int8`); and oneDNN's bfloat16 on
its own layout. Six layers' matrices of SmolLM2-135M, one thread. Processor time, the least of the
repeats, in which all kinds take turns: so others on the machine change a ratio little. The last
line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aioserve.features.quantized.blocks import quantize
from aioserve.kernels import Kernels, usable_variants
from aioserve.runner.cpu.products import BlockLinear, PanelLinear, pack_linear

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # (outputs, inputs) of a layer
LAYERS = 6
HEAD = (49152, 576)
ROWS = (1, 4, 16, 64, 256, 512)
KINDS = ("Q4_0", "Q8_0")
DTYPE = torch.bfloat16
Times = dict[int, dict[str, float]]


def quantized(kernels: Kernels, weight: Tensor, kind: str, *, is_int8: bool) -> BlockLinear:
    """A product with a weight in the format `kind`, and with rows of int8 or exact ones."""
    linear = BlockLinear.of(kernels, [quantize(weight, kind)], None, DTYPE)
    if is_int8:
        linear.quantize_rows()
    return linear


def measure(variant: str, shapes: Sequence[tuple[int, int]], repeats: int) -> Times:
    """By rows: the time of each kind to that of bfloat16, and milliseconds of that."""
    kernels = Kernels(variant)
    weights = [torch.randn(shape) / 8 for shape in shapes]
    kinds: dict[str, Sequence[Callable[[Tensor], Tensor]]] = {}
    for kind in KINDS:
        for name, is_int8 in ((kind, False), (f"{kind}, int8", True)):
            kinds[name] = [quantized(kernels, weight, kind, is_int8=is_int8) for weight in weights]
    kinds["oneDNN"] = [pack_linear(weight.to(DTYPE), None) for weight in weights]
    kinds["bfloat16"] = [PanelLinear.of(kernels, weight.to(DTYPE), None) for weight in weights]
    found: Times = {}
    for rows in ROWS:
        inputs = [torch.randn(rows, weight.shape[1]).to(DTYPE) for weight in weights]
        least = dict.fromkeys(kinds, float("inf"))
        for _ in range(repeats):
            for kind, products in kinds.items():
                began = time.thread_time()
                for product, x in zip(products, inputs, strict=True):
                    product(x)
                least[kind] = min(least[kind], time.thread_time() - began)
        whole = least.pop("bfloat16")
        found[rows] = {kind: seconds / whole for kind, seconds in least.items()}
        found[rows]["bfloat16, ms"] = 1e3 * whole
        values = "".join(f"{value:14.2f}" for value in found[rows].values())
        print(f"{variant:12}{rows:6}{values}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("variants", nargs="*", default=usable_variants(), help="of the kernels")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--head", action="store_true", help="the head's matrix, not six layers'")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for kind in KINDS for name in (kind, f"{kind}, int8")]
    names += ("oneDNN", "bfloat16, ms")
    print(f"{'':12}{'rows':>6}" + "".join(f"{name:>14}" for name in names))
    shapes = [HEAD] if args.head else SHAPES * LAYERS
    print(json.dumps({name: measure(name, shapes, args.repeats) for name in args.variants}))


if __name__ == "__main__":
    main()
