"""LoRA adapters on a model: what is added to its products and where, for which rows of a step.

Plain torch, wherever torch runs. The host knows which token has which adapter, and which rows of a
device these are: to ask a device would be to wait for it. Knows products by the names of their
model; knows nothing about requests or the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from aioserve.errors import ConfigError

if TYPE_CHECKING:
    from aioserve.features.lora.peft_directory import AdapterFiles, LowRank

Place: TypeAlias = Hashable  # a product of a model, by whatever it calls it
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


class TokenAdapters:
    """Which of T tokens have adapters, where these are computed."""

    def __init__(self, groups: Sequence[tuple[Adapter, Tensor]]) -> None:
        """`groups`: adapters, and the rows (int64, ascending) of the T that have them."""
        self.groups = groups

    def add(self, place: Place, x: Tensor, out: Tensor) -> None:
        """Add what adapters have to `out` [T, out], which a product made of `x` [T, in]."""
        for adapter, rows in self.groups:
            if (product := adapter.products.get(place)) is not None:
                product.add(x, out, rows)

    def embed(self, ids: Tensor, out: Tensor) -> None:
        """Add what adapters have to `out` [T, hidden], the embeddings of `ids` [T]."""
        for adapter, rows in self.groups:
            if adapter.table is not None:
                adapter.table.add(ids, out, rows)


@dataclass(frozen=True, slots=True)
class AdapterOwners:
    """Which adapter each of T tokens has, as the host knows it."""

    adapters: Sequence[Adapter]
    places: IntArray  # T, which of the `adapters`; -1: none

    def take(self, rows: npt.NDArray[np.integer]) -> "AdapterOwners":
        """The owners of these rows alone."""
        return AdapterOwners(self.adapters, self.places[rows])

    def groups(self) -> list[tuple[Adapter, IntArray]]:
        """Whose rows there are, and which, ascending."""
        rows = [np.flatnonzero(self.places == place) for place in range(len(self.adapters))]
        return [(a, own) for a, own in zip(self.adapters, rows, strict=True) if len(own)]

    def on_cpu(self) -> TokenAdapters:
        """The adapters of tokens that are computed on the CPU."""
        return TokenAdapters([(a, torch.from_numpy(rows)) for a, rows in self.groups()])


# Where a model takes adapters: which of its modules, how large they are, where their outputs go.
# Puts files on them, or says why they do not fit. Knows names of modules and shapes; how a product
# is added to is said above, or by callers that give another way.


_NUM_COMPARED = 16  # rows or columns of a weight that an adapter brings along
# How far the same weight may be from itself: one was quantized, say.
_MOST_DIFFERENT = 0.2


class Site(NamedTuple):
    """A linear module: a part of the outputs of a product."""

    place: Place
    begin: int  # of its outputs that are here, among those of the product
    num_outputs: int
    num_inputs: int
    outputs: slice = slice(None)  # those that this rank has of a module that ranks share
    inputs: slice = slice(None)


class AdapterSites:
    """The places of one model that can have LoRA adapters. Used from any thread."""

    def __init__(
        self,
        find: Callable[[str], Site | None],
        *,
        dtype: torch.dtype,
        device: torch.device,
        table_shape: tuple[int, int] | None,
        rows_of_table: Callable[[Tensor], Tensor],
        head: Callable[[Tensor], Tensor],
        is_table: Callable[[str], bool],
        make_product: Callable[[Sequence[Piece]], LowRankProduct] = TorchProduct,
        make_table: Callable[[Piece], LowRankTable] = TorchTable,
    ) -> None:
        """`find`: a linear module by its name; None if there is none of that name that can have
        adapters. `table_shape`: tokens and hidden size of the embedding; None if that cannot.
        `is_table` says which name means it, `rows_of_table` its rows [N, hidden] by token ids [N],
        `head` logits of hidden states, those of this rank.
        """
        self._find = find
        self.dtype, self._device = dtype, device
        self._table_shape = table_shape
        self._rows_of_table = rows_of_table
        self._head = head
        self._is_table = is_table
        self._make_product, self._make_table = make_product, make_table

    @torch.inference_mode()
    def put(self, files: "AdapterFiles") -> Adapter:
        """The adapter on this model. Raises `ConfigError` that names the first that does not fit:
        it was made for another model.
        """
        try:
            return self._put(files)
        except ConfigError as error:
            raise ConfigError(f"adapter {files.path}: {error}") from None

    def _put(self, files: "AdapterFiles") -> Adapter:
        pieces: dict[Place, list[Piece]] = {}
        for name, part in files.modules.items():
            site = self._find(name)
            if site is None:
                raise ConfigError(f"the model has no linear layer {name} that can have an adapter")
            _check_shape(name, part, site.num_outputs, site.num_inputs)
            pieces.setdefault(site.place, []).append(self._piece(part, site))
        table = None
        for name, part in files.embeddings.items():
            if self._table_shape is None or not self._is_table(name):
                raise ConfigError(f"the model has no embedding {name} that can have an adapter")
            _check_shape(name, part, self._table_shape[1], self._table_shape[0])
            table = self._piece(part, Site(name, 0, *self._table_shape[::-1]))
        for name, weight in files.base_weights.items():
            self._compare(name, weight)
        return Adapter(
            {
                place: self._make_product(sorted(own, key=lambda piece: piece.begin))
                for place, own in pieces.items()
            },
            None if table is None else self._make_table(table),
            files.num_parameters * self.dtype.itemsize,
        )

    def _piece(self, part: "LowRank", site: Site) -> Piece:
        a = part.a[:, site.inputs].to(self._device, self.dtype)
        b = (part.b[site.outputs].float() * part.scale).to(self._device, self.dtype)
        return Piece(site.begin, a, b)

    def _compare(self, name: str, weight: Tensor) -> None:
        """PEFT saves the base model's weights of embeddings and heads with their adapters."""
        is_table = self._is_table(name)
        site = None if is_table else self._find(name)
        shape = self._table_shape if is_table else site and (site.num_outputs, site.num_inputs)
        if shape is None or tuple(weight.shape) != tuple(shape):
            raise ConfigError(f"it brings a {name} {list(weight.shape)}, the model's is {shape}")
        weight = weight.to(self._device, self.dtype)
        if is_table:
            ids = torch.linspace(0, shape[0] - 1, _NUM_COMPARED, device=self._device).long()
            own, other = self._rows_of_table(ids), weight[ids]
        elif site is not None and name.endswith("lm_head"):
            count = min(_NUM_COMPARED, shape[1])
            unit = torch.eye(shape[1], dtype=self.dtype, device=self._device)[:count]
            other = weight[site.outputs, :count].T
            own = self._head(unit)[:, : other.shape[1]]
        else:
            raise ConfigError(f"it brings weights of {name}: only those of adapters are served")
        if not (own - other).float().norm() <= _MOST_DIFFERENT * other.float().norm():
            raise ConfigError(f"it brings another {name} than the model's, which is not served")


def _check_shape(name: str, part: "LowRank", num_outputs: int, num_inputs: int) -> None:
    found = (len(part.b), part.a.shape[1])
    if found != (num_outputs, num_inputs):
        raise ConfigError(
            f"{name} has {found[1]} inputs and {found[0]} outputs, in the model it has "
            f"{num_inputs} and {num_outputs}: it is of another base"
        )
