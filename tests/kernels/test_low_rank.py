"""What adapters add, by every variant that this CPU runs, against torch in float64."""

import pytest
import torch
from torch import Tensor

from aioserve.features.lora.cpu_products import CompiledProduct, CompiledTable
from aioserve.features.lora.products import Piece
from aioserve.kernels import Kernels, usable_variants

if not usable_variants():
    pytest.skip("the kernels were not built", allow_module_level=True)

# Relative to the sum of the absolute values: sums in float32, and one rounding.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ROWS = [1, 2, 5, 6, 7, 13, 24, 25, 60]  # where tiles of rows begin, and more than are taken at once


def check(found: Tensor, before: Tensor, x: Tensor, pieces: list[Piece]) -> None:
    """`before` and what the pieces make of `x` [rows, in]."""
    expected, size = before.double(), before.double().abs()
    for begin, a, b in pieces:
        columns = slice(begin, begin + len(b))
        expected[:, columns] += x.double() @ a.double().T @ b.double().T
        size[:, columns] += x.double().abs() @ a.double().abs().T @ b.double().abs().T
    assert ((found.double() - expected).abs() <= TOLERANCE[found.dtype] * size).all()


def test_products_of_any_shape_are_close_to_float64(kernels: Kernels, dtype: torch.dtype) -> None:
    for num_rows in ROWS:
        generator = torch.Generator().manual_seed(num_rows)

        def draw(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        inputs = 272  # more than are taken at a time
        pieces = [
            Piece(0, draw(1, inputs), draw(16, 1)),
            Piece(16, draw(17, inputs), draw(133, 17)),
            Piece(160, draw(8, inputs), draw(48, 8)),
        ]
        x, out = draw(2 * num_rows, inputs), draw(2 * num_rows, 208)
        rows, found = torch.arange(num_rows) * 2 + 1, out.clone()
        CompiledProduct(kernels, pieces).add(x, found, rows)
        check(found[rows], out[rows], x[rows], pieces)
        assert torch.equal(found[rows - 1], out[rows - 1])
        assert torch.equal(found[:, 149:160], out[:, 149:160])
        alone = out.clone()  # no result depends on other rows
        CompiledProduct(kernels, pieces).add(x, alone, rows[-1:])
        assert torch.equal(alone[rows[-1]], found[rows[-1]])


def test_embeddings_are_close_to_float64(kernels: Kernels, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    piece = Piece(
        0, *(torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 40), (80, 3)))
    )
    out = torch.randn(30, 80, generator=generator).to(dtype)
    ids, rows, found = torch.arange(30) * 7 % 40, torch.arange(1, 30, 3), out.clone()
    CompiledTable(kernels, piece).add(ids, found, rows)
    check(found[rows], out[rows], torch.eye(40)[ids[rows]], [piece])
    assert torch.equal(found[rows - 1], out[rows - 1])
