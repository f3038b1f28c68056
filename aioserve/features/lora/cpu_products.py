"""What adapters add, by our own kernels: factors in their layout, all of an adapter for one call.

Knows how the kernels want them; knows nothing about names, files or requests.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, get_args
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.features.lora.products import (
    Adapter,
    LowRankProduct,
    LowRankTable,
    LowRankTokens,
    Piece,
    TorchProduct,
)
from aioserve.kernels import AdapterStruct, Kernels, LowRankPiece, LowRankStruct, load_kernels
from aioserve.runner.adapters import DecoderAdapters, Place, TokenAdapters
from aioserve.runner.fused.decoder import HEAD, LayerProduct

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
        """Return whether there is a kernel for them."""
        return len(pieces) <= 3 and pieces[0].a.shape[1] % _MULTIPLE == 0

    def add(self, x: Tensor, out: Tensor, rows: Tensor) -> None:
        own = AdapterStruct(ctypes.pointer(self.struct), None, rows.data_ptr(), len(rows))
        self._kernels.add_low_rank(own, x, None, out)


class CompiledTable(LowRankTable):
    """The sums that a LoRA adapter adds to an embedding, computed by the compiled kernels."""

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


def make_product(pieces: Sequence[Piece]) -> LowRankProduct:
    """Return the addition to a product by `pieces` in the order of their outputs: by the kernels,
    or by torch where there is none for them.
    """
    if CompiledProduct.serves(pieces):
        return CompiledProduct(load_kernels(), pieces)
    return TorchProduct(pieces)


def make_table(piece: Piece) -> LowRankTable:
    """Return the addition to the embedding."""
    return CompiledTable(load_kernels(), piece)


class CompiledAdapters(DecoderAdapters):
    """The adapters that a decoder has met, laid out for its one call."""

    def __init__(self, num_layers: int) -> None:
        layers = [(i, name) for i in range(num_layers) for name in get_args(LayerProduct)]
        self._places: list[Place] = [*layers, HEAD]
        # Gone with their adapters.
        self._known: WeakKeyDictionary[Adapter, CompiledAdapter] = WeakKeyDictionary()

    def serves(self, tokens: TokenAdapters) -> bool:
        assert isinstance(tokens, LowRankTokens), "of this part"
        return all(CompiledAdapter.serves(adapter) for adapter, _ in tokens.groups)

    def structs(self, *rows: TokenAdapters | None) -> tuple[Any, ...]:
        structs = [
            [self._of(adapter).of(own) for adapter, own in one.groups]
            if isinstance(one, LowRankTokens)
            else []
            for one in rows
        ]
        arrays = [(AdapterStruct * len(own))(*own) for own in structs]
        return (*arrays, *map(len, arrays))

    def _of(self, adapter: Adapter) -> "CompiledAdapter":
        found = self._known.get(adapter)
        if found is None:
            found = self._known[adapter] = CompiledAdapter(adapter, self._places)
        return found


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
        """Return whether all of it is compiled."""
        return all(isinstance(product, CompiledProduct) for product in adapter.products.values())

    def of(self, rows: Tensor) -> AdapterStruct:
        """Return the struct of the kernels for these rows, which the caller keeps."""
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
