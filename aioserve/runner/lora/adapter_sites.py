"""Where a model takes adapters: which of its modules, how large they are, where their outputs go.

Puts files on them, or says why they do not fit. Knows names of modules and shapes; how a product is
added to is known to `low_rank` and to callers that give another way.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aioserve.errors import ConfigError
from aioserve.model_source.adapter import AdapterFiles, LowRank
from aioserve.runner.low_rank import (
    Adapter,
    LowRankProduct,
    LowRankTable,
    Piece,
    Place,
    TorchProduct,
    TorchTable,
)

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
    def put(self, files: AdapterFiles) -> Adapter:
        """The adapter on this model. Raises `ConfigError` that names the first that does not fit:
        it was made for another model.
        """
        try:
            return self._put(files)
        except ConfigError as error:
            raise ConfigError(f"adapter {files.path}: {error}") from None

    def _put(self, files: AdapterFiles) -> Adapter:
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

    def _piece(self, part: LowRank, site: Site) -> Piece:
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


def _check_shape(name: str, part: LowRank, num_outputs: int, num_inputs: int) -> None:
    found = (len(part.b), part.a.shape[1])
    if found != (num_outputs, num_inputs):
        raise ConfigError(
            f"{name} has {found[1]} inputs and {found[0]} outputs, in the model it has "
            f"{num_inputs} and {num_outputs}: it is of another base"
        )
