"""LoRA adapters on a model: what is added to its products and where, for which rows of a step.

Plain torch, wherever torch runs. The host knows which token has which adapter, and which rows of a
device these are: to ask a device would be to wait for it. Knows products by the names of their
model; knows nothing about requests or the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.runner.adapters import AdapterOwners, Place, TokenAdapters

if TYPE_CHECKING:
    pass

IntArray: TypeAlias = npt.NDArray[np.int64]


class Piece(NamedTuple):
    """One factor pair; several with the same input stand side by side in a fused product."""

    begin: int  # the first of the outputs that it adds to
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank], scaled


class LowRankProduct(ABC):
    """The addition of a LoRA adapter to one product."""

    tensors: tuple[Tensor, ...] = ()  # that it consists of, if they are torch's to give back

    @abstractmethod
    def add(self, x: Tensor, out: Tensor, rows: Tensor) -> None:
        """`out` [T, out] += what comes of `x` [T, in], in these `rows` (int64, ascending)."""


class LowRankTable(ABC):
    """The addition of a LoRA adapter to an embedding."""

    tensors: tuple[Tensor, ...] = ()  # that it consists of, if they are torch's to give back

    @abstractmethod
    def add(self, ids: Tensor, out: Tensor, rows: Tensor) -> None:
        """`out` [T, hidden] += what comes of `ids` [T], in these `rows`."""


class TorchProduct(LowRankProduct):
    """A product by plain torch. Sums are float32 until they are added: roundings on the way to the
    narrow numbers and back would be as large as those of the product itself.
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
        self.tensors = (self._a, *(b for _, _, b in self._parts))

    def add(self, x: Tensor, out: Tensor, rows: Tensor) -> None:
        narrow = F.linear(x[rows].float(), self._a.float())
        for columns, ranks, b in self._parts:
            wide = F.linear(narrow[:, ranks], b.float())
            out[rows, columns] = (out[rows, columns] + wide).to(out.dtype)


class TorchTable(LowRankTable):
    """LoRA products in plain torch."""

    def __init__(self, piece: Piece) -> None:
        self.tensors = self._table, self._b = piece.a.T.contiguous(), piece.b

    def add(self, ids: Tensor, out: Tensor, rows: Tensor) -> None:
        wide = F.linear(self._table[ids[rows]].float(), self._b.float())
        out[rows] = (out[rows] + wide).to(out.dtype)


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter, laid out for its model."""

    products: dict[Place, LowRankProduct]
    table: LowRankTable | None
    num_bytes: int

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the adapter that are torch's."""
        parts = [*self.products.values(), *(() if self.table is None else (self.table,))]
        return [tensor for part in parts for tensor in part.tensors]


class LowRankTokens(TokenAdapters):
    """The adapters that each of T tokens has."""

    def __init__(self, groups: Sequence[tuple[Adapter, Tensor]]) -> None:
        """`groups`: adapters, and the rows (int64, ascending) of the T that have them."""
        self.groups = groups

    def add(self, place: Place, x: Tensor, out: Tensor) -> None:
        for adapter, rows in self.groups:
            if (product := adapter.products.get(place)) is not None:
                product.add(x, out, rows)

    def embed(self, ids: Tensor, out: Tensor) -> None:
        for adapter, rows in self.groups:
            if adapter.table is not None:
                adapter.table.add(ids, out, rows)


@dataclass(frozen=True, slots=True)
class LowRankOwners(AdapterOwners):
    """The one of the `adapters` that each of T tokens has."""

    adapters: Sequence[Adapter]
    places: IntArray  # T, which of the `adapters`; -1: none

    def take(self, rows: npt.NDArray[np.integer]) -> "LowRankOwners":
        return LowRankOwners(self.adapters, self.places[rows])

    def groups(self) -> list[tuple[Adapter, IntArray]]:
        """Whose rows there are, and which, ascending."""
        rows = [np.flatnonzero(self.places == place) for place in range(len(self.adapters))]
        return [(a, own) for a, own in zip(self.adapters, rows, strict=True) if len(own)]

    def on_cpu(self) -> LowRankTokens:
        return LowRankTokens([(a, torch.from_numpy(rows)) for a, rows in self.groups()])
