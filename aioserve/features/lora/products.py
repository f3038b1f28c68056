"""LoRA adapters on a model in plain torch: what is added to its products and where, for which rows.

The host knows which token has which adapter, and which rows of a device these are: to ask a device
would be to wait for it. Knows products by the names of their model; knows nothing about requests or
the batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aioserve.gpu.tensor_parallel.shard import share_of
from aioserve.runner.adapters import (
    AdapterHooks,
    AdapterOwners,
    AdapterSites,
    Place,
    Site,
    TokenAdapters,
)
from aioserve.runner.served_model import LayerStates

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
        """Return the adapters with rows, and which rows, ascending."""
        rows = [np.flatnonzero(self.places == place) for place in range(len(self.adapters))]
        return [(a, own) for a, own in zip(self.adapters, rows, strict=True) if len(own)]

    def on_cpu(self) -> LowRankTokens:
        return LowRankTokens([(a, torch.from_numpy(rows)) for a, rows in self.groups()])


# Adapters on modules of `transformers` as they are, by hooks on those that can have them.


class HookedAdapters(AdapterHooks):
    """The adapters of one model, by hooks. A step says first what it is computed with."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._head = module.get_output_embeddings()  # type: ignore[operator]
        self._tokens: TokenAdapters | None = None  # of what passes through all but the head
        self._sampling: TokenAdapters | None = None  # of what passes through that
        self._names: dict[str, nn.Linear] = {}
        self._table: tuple[str, nn.Embedding] | None = None

    @contextmanager
    def finding(self, num_tokens: int, states: LayerStates | None = None) -> Iterator[None]:
        handles = []
        for name, module in self._module.named_modules():
            if isinstance(module, nn.Linear) and (states is None or module not in states):
                handles.append(module.register_forward_hook(self._seen(name, num_tokens)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        table = self._module.get_input_embeddings()  # type: ignore[operator]
        for name, module in self._module.named_modules():
            if module is table and type(module) is nn.Embedding:  # a subclass may scale
                self._table = (name, module)
                module.register_forward_hook(self._embed)
        for name, module in self._names.items():
            # First: ranks put their parts of an output together by a hook of their own.
            hook = self._adapted(name, module is self._head)
            module.register_forward_hook(hook, prepend=True)

    @contextmanager
    def used(self, tokens: TokenAdapters | None, sampling: TokenAdapters | None) -> Iterator[None]:
        self._tokens, self._sampling = tokens, sampling
        try:
            yield
        finally:
            self._tokens = self._sampling = None

    def sites(self, head: Callable[[Tensor], Tensor]) -> AdapterSites:
        weight = next(self._module.parameters())
        table, shape = self._table, None
        if table is not None:
            shape = (table[1].num_embeddings, table[1].embedding_dim)

        # A part of a larger model has names that it had there.
        own_name: Callable[[str], str] = getattr(self._module, "own_name", str)

        def find(name: str) -> Site | None:
            name = own_name(name)
            module = self._names.get(name)
            if module is None:
                return None
            return Site(name, 0, *share_of(module))

        return AdapterSites(
            find=find,
            dtype=weight.dtype,
            device=weight.device,
            table_shape=shape,
            # `forward`, as for the head
            rows_of_table=lambda ids: table[1].forward(ids) if table is not None else ids,
            head=head,
            is_table=lambda name: table is not None and own_name(name) == table[0],
        )

    def _seen(self, name: str, num_tokens: int) -> Callable[..., None]:
        def note(module: nn.Linear, args: tuple[Any, ...], _: Any) -> None:
            if args and tuple(args[0].shape) == (1, num_tokens, module.in_features):
                self._names[name] = module

        return note

    def _adapted(self, name: str, is_head: bool) -> Callable[..., None]:
        def add(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            adapters = self._sampling if is_head else self._tokens
            if adapters is not None:
                adapters.add(name, args[0][0], out[0])

        return add

    def _embed(self, _: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        if self._tokens is not None:
            self._tokens.embed(args[0][0], out[0])
