"""What adapters add, by our own kernels: factors in their layout, all of an adapter for one call.

Knows how the kernels want them; knows nothing about names, files or requests.
"""

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.features.lora.products import Adapter, LowRankProduct, LowRankTable, Piece, Place
from aioserve.kernels import Kernels
from aioserve.kernels.structs import AdapterStruct, LowRankPiece, LowRankStruct

_MULTIPLE = 16  # inputs


class CompiledProduct(LowRankProduct):
    """The low-rank addition to a product of up to three pieces, by the compiled kernels."""

    def __init__(self, kernels: Kernels, pieces: Sequence[Piece]) -> None:
        """`serves` must be true of them."""
        self._kernels = kernels
        a = torch.cat([piece.a for piece in pieces])
        self._a = _panels(a, kernels.lanes)
        self._bs = [_pack_b(kernels, piece.b) for piece in pieces]
        self.struct = LowRankStruct(
            a=self._a.data_ptr(),
            inputs=a.shape[1],
            ranks=self._a.shape[0] * kernels.lanes,
            pieces=_pieces(pieces, self._bs),
            num_pieces=len(pieces),
        )

    @staticmethod
    def serves(pieces: Sequence[Piece]) -> bool:
        """Whether there is a kernel for them."""
        return len(pieces) <= 3 and pieces[0].a.shape[1] % _MULTIPLE == 0

    def add(self, x: Tensor, out: Tensor, rows: Tensor) -> None:
        own = AdapterStruct(ctypes.pointer(self.struct), None, rows.data_ptr(), len(rows))
        self._kernels.add_low_rank(own, x, None, out)


class CompiledTable(LowRankTable):
    """What a LoRA adapter adds to an embedding, computed by the compiled kernels."""

    def __init__(self, kernels: Kernels, piece: Piece) -> None:
        self._kernels = kernels
        self._table = _pad(piece.a.T, 1, kernels.lanes).contiguous()
        self._bs = [_pack_b(kernels, piece.b)]
        self.struct = LowRankStruct(
            a=self._table.data_ptr(),
            inputs=0,
            ranks=self._table.shape[1],
            pieces=_pieces([piece], self._bs),
            num_pieces=1,
        )

    def add(self, ids: Tensor, out: Tensor, rows: Tensor) -> None:
        own = AdapterStruct(None, ctypes.pointer(self.struct), rows.data_ptr(), len(rows))
        self._kernels.add_low_rank(own, None, ids, out)


class CompiledAdapter:
    """All products of an adapter, by the numbers of their places; its embedding. Points into the
    adapter, which the caller keeps alive.
    """

    def __init__(self, adapter: Adapter, places: Sequence[Place]) -> None:
        """`serves` must be true of it."""
        products = [adapter.products.get(place) for place in places]
        self._products = (LowRankStruct * len(products))(
            *(p.struct if isinstance(p, CompiledProduct) else LowRankStruct() for p in products)
        )
        self._table = adapter.table.struct if isinstance(adapter.table, CompiledTable) else None

    @staticmethod
    def serves(adapter: Adapter) -> bool:
        """Whether all of it is compiled."""
        return all(isinstance(product, CompiledProduct) for product in adapter.products.values())

    def of(self, rows: Tensor) -> AdapterStruct:
        """The struct of the kernels for these rows, which the caller keeps."""
        products = ctypes.cast(self._products, ctypes.POINTER(LowRankStruct))
        table = None if self._table is None else ctypes.pointer(self._table)
        return AdapterStruct(products, table, rows.data_ptr(), len(rows))


def _pieces(pieces: Sequence[Piece], packed: Sequence[Tensor]) -> ctypes.Array[LowRankPiece]:
    structs, first = (LowRankPiece * 3)(), 0
    for number, (piece, b) in enumerate(zip(pieces, packed, strict=True)):
        outputs, rank = piece.b.shape
        structs[number] = LowRankPiece(b.data_ptr(), first, rank, piece.begin, outputs)
        first += rank
    return structs


def _pack_b(kernels: Kernels, b: Tensor) -> Tensor:
    return _panels(b, kernels.panel_shapes[b.dtype].outputs)


def _panels(x: Tensor, size: int) -> Tensor:
    """[n, k] as [n / size, k, size]."""
    return _pad(x, 0, size).view(-1, size, x.shape[1]).transpose(1, 2).contiguous()


def _pad(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Zeros after the end of a dimension of a matrix."""
    missing = -x.shape[dim] % multiple
    return F.pad(x, (0, 0, 0, missing) if dim == 0 else (0, missing))
