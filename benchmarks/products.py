"""The matrix products of a model's layers: the library's and our kernels', in turns.

    python benchmarks/products.py 135m --threads 1         # or 0.6b, 2m, or a model directory
    python benchmarks/products.py 135m --rows 512 4096

The library is oneDNN on weights that it has packed, as in `floors.py`; both multiply in bfloat16,
by one weight of each shape that the model has, which stay in the last-level cache. Values are the
least processor time of some turns, so on one thread they count beside other work as well. The last
line is JSON.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence

import torch
from floors import Shapes, packed_product
from make_model import SHAPES, model_path
from torch import Tensor

from aioserve.config import ModelConfig
from aioserve.kernels import load_kernels
from aioserve.model_source.info import ModelInfo
from aioserve.runner.cpu.products import PanelLinear

DTYPE = torch.bfloat16
ROWS = [64, 256, 512, 2048, 4096]  # fewer would read from memory in a model, not here
ROWS_IN_A_TURN = 1024  # few rows are multiplied again and again, until a turn has this many


def processor_seconds(
    products: Sequence[Callable[[Tensor], Tensor]], inputs: Sequence[Tensor], repeats: int
) -> float:
    """All of the products once, as the mean of `repeats`."""
    began = time.process_time()
    for _ in range(repeats):
        for run, x in zip(products, inputs, strict=True):
            run(x)
    return (time.process_time() - began) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", help=f"a directory, or one of {', '.join(SHAPES)}")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    info = ModelInfo(ModelConfig(model=str(model_path(args.model))))
    products = Shapes.of(info.hf_config, DTYPE).products
    shapes = list(dict.fromkeys(products))
    layers = len(products) / len(shapes)
    kernels = load_kernels()
    weights = [torch.randn(shape, dtype=DTYPE) for shape in shapes]
    sides: tuple[list[Callable[[Tensor], Tensor]], ...] = (
        [packed_product(weight).run for weight in weights],
        [PanelLinear.of(kernels, weight, None) for weight in weights],
    )
    print(
        f"{'rows':>6}{'library':>10}{'ours':>10}{'ratio':>8}  ms of all layers, {kernels.variant}"
    )
    found = []
    for rows in args.rows:
        inputs = [torch.randn(rows, shape[1], dtype=DTYPE) for shape in shapes]
        repeats = max(1, ROWS_IN_A_TURN // rows)
        times: list[list[float]] = [[], []]
        with torch.inference_mode():
            for _ in range(args.turns + 1):  # the first warms up
                for side, taken in zip(sides, times, strict=True):
                    taken.append(processor_seconds(side, inputs, repeats))
        library, ours = (1e3 * layers * min(taken[1:]) for taken in times)
        found.append({"rows": rows, "library_ms": library, "ours_ms": ours})
        print(f"{rows:6}{library:10.2f}{ours:10.2f}{ours / library:8.2f}", flush=True)
    print(json.dumps({"threads": args.threads, "rows": found}))


if __name__ == "__main__":
    main()
