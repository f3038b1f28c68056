"""Adapters on a model: what is added to its products, and for which rows of a step.

Plain torch, wherever torch runs. Knows products by the names that their model gives them; knows
nothing about requests, files or layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Place: TypeAlias = Hashable  # a product of a model, by whatever it calls it


class Piece(NamedTuple):
    """One factor pair; several with the same input stand side by side in a fused product."""

    begin: int  # the first of the outputs that it adds to
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank], scaled


class LowRankProduct(ABC):
    """What an adapter adds to one product."""

    @abstractmethod
    def add(self, x: Tensor, out: Tensor, rows: Tensor) -> None:
        """`out` [T, out] += what comes of `x` [T, in], in these `rows` (int64, ascending)."""


class LowRankTable(ABC):
    """What an adapter adds to an embedding."""

    @abstractmethod
    def add(self, ids: Tensor, out: Tensor, rows: Tensor) -> None:
        """`out` [T, hidden] += what comes of `ids` [T], in these `rows`."""


class TorchProduct(LowRankProduct):
    """By plain torch. Sums are float32 until they are added: roundings on the way to the narrow
    numbers and back would be as large as those of the product itself.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._a = torch.cat([piece.a for piece in pieces])
        self._parts: list[tuple[slice, slice, Tensor]] = []  # outputs, ranks, b
        rank = 0
        for piece in pieces:
            size, own = piece.b.shape
            columns = slice(piece.begin, piece.begin + size)
            self._parts.append((columns, slice(rank, rank + own), piece.b.contiguous()))
            rank += own

    def add(self, x: Tensor, out: Tensor, rows: Tensor) -> None:
        narrow = F.linear(x[rows].float(), self._a.float())
        for columns, ranks, b in self._parts:
            wide = F.linear(narrow[:, ranks], b.float())
            out[rows, columns] = (out[rows, columns] + wide).to(out.dtype)


class TorchTable(LowRankTable):
    """By plain torch."""

    def __init__(self, piece: Piece) -> None:
        self._table, self._b = piece.a.T.contiguous(), piece.b

    def add(self, ids: Tensor, out: Tensor, rows: Tensor) -> None:
        wide = F.linear(self._table[ids[rows]].float(), self._b.float())
        out[rows] = (out[rows] + wide).to(out.dtype)


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter, laid out for its model."""

    products: dict[Place, LowRankProduct]
    table: LowRankTable | None
    num_bytes: int


class TokenAdapters:
    """Which adapter each of T packed tokens has, or of T rows that were taken of them."""

    def __init__(self, adapters: Sequence[Adapter], owners: Tensor) -> None:
        """`owners` int64 [T]: which of `adapters`; -1: none."""
        self._adapters, self._owners = adapters, owners
        groups = [(owners == place).nonzero()[:, 0] for place in range(len(adapters))]
        #: Whose rows there are, and which, ascending.
        self.groups = [(a, rows) for a, rows in zip(adapters, groups, strict=True) if len(rows)]

    def take(self, rows: Tensor) -> "TokenAdapters":
        """The same of these rows."""
        return TokenAdapters(self._adapters, self._owners[rows])

    def add(self, place: Place, x: Tensor, out: Tensor) -> None:
        """To `out` [T, out], which a product made of `x` [T, in]."""
        for adapter, rows in self.groups:
            if (product := adapter.products.get(place)) is not None:
                product.add(x, out, rows)

    def embed(self, ids: Tensor, out: Tensor) -> None:
        """To `out` [T, hidden], the embeddings of `ids` [T]."""
        for adapter, rows in self.groups:
            if adapter.table is not None:
                adapter.table.add(ids, out, rows)


def taken(adapters: TokenAdapters | None, rows: Tensor) -> TokenAdapters | None:
    """Of these rows; None where nobody has an adapter."""
    return None if adapters is None else adapters.take(rows)
