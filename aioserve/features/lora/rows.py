"""Which adapters are loaded, and which row of the batch has which; how one is put on a model.

A row keeps its adapter whatever is unloaded meanwhile. Knows rows and requests' adapter ids, names
of modules and shapes; knows nothing about files.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from aioserve.errors import ConfigError
from aioserve.features.lora.peft_directory import AdapterFiles, LowRank
from aioserve.features.lora.products import (
    Adapter,
    LowRankOwners,
    LowRankProduct,
    LowRankTable,
    Piece,
    TorchProduct,
    TorchTable,
)
from aioserve.runner import interface
from aioserve.runner.adapters import AdapterSites, LoadedAdapters, Place, Site
from aioserve.runner.attention.backend import ADAPTERS, StepInputs
from aioserve.runner.batch.input_batch import BatchPart
from aioserve.scheduler.output import NewRequestData, SchedulerOutput


class AdapterRows(BatchPart[Adapter]):
    """Loaded adapters by id, and those of rows; which tokens of a step have which is
    `LowRankOwners`, if any has one.
    """

    name = ADAPTERS
    asked_by = "adapter_id"

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, Adapter] = {}

    def set(self, row: int, request: NewRequestData) -> None:
        """Raises `KeyError` if the adapter of the request is not loaded."""
        self.rows[row] = self.loaded[request.adapter_id]

    def prepare(self, inputs: StepInputs, step: SchedulerOutput) -> StepInputs:
        del step
        found: dict[int, tuple[int, Adapter]] = {}  # by identity: its place
        owners = np.full(len(inputs.rows), -1, dtype=np.int64)
        for index, row in enumerate(inputs.rows.tolist()):
            if (adapter := self.rows.get(row)) is not None:
                owners[index], _ = found.setdefault(id(adapter), (len(found), adapter))
        if found:
            adapters = [adapter for _, adapter in found.values()]
            own = LowRankOwners(adapters, np.repeat(owners, np.diff(inputs.query_start_loc)))
            inputs.parts[self.name] = own
        return inputs


class LoadedLowRank(LoadedAdapters):
    """Loads and drops LoRA adapters: those that rows of the batch may have."""

    def __init__(self, sites: AdapterSites, rows: AdapterRows) -> None:
        self._sites, self._rows = sites, rows

    def put(self, files: interface.AdapterFiles) -> Adapter:
        assert isinstance(files, AdapterFiles), "read by this part"
        return put_on(self._sites, files)

    def load(self, adapter_id: str, adapter: object) -> None:
        assert isinstance(adapter, Adapter), "made by `put`"
        self._rows.loaded[adapter_id] = adapter

    @property
    def loaded(self) -> dict[str, Adapter]:
        """Loaded LoRA adapters, of which requests may come, by id."""
        return self._rows.loaded

    def unload(self, adapter_id: str) -> None:
        self._rows.loaded.pop(adapter_id, None)


# Puts files where a model takes adapters, or says why they do not fit. Knows names of modules and
# shapes.


_NUM_COMPARED = 16  # rows or columns of a weight that an adapter brings along
# How far the same weight may be from itself: one was quantized, say.
_MOST_DIFFERENT = 0.2


def _check_shape(name: str, part: LowRank, num_outputs: int, num_inputs: int) -> None:
    found = (len(part.b), part.a.shape[1])
    if found != (num_outputs, num_inputs):
        raise ConfigError(
            f"{name} has {found[1]} inputs and {found[0]} outputs, in the model it has "
            f"{num_inputs} and {num_outputs}: it is of another base"
        )


@torch.inference_mode()
def put_on(sites: AdapterSites, files: AdapterFiles) -> Adapter:
    """Return the adapter on the model of `sites`. Raises `ConfigError` that names the first module
    that does not fit: it was made for another model.
    """
    try:
        return _put(sites, files)
    except ConfigError as error:
        raise ConfigError(f"adapter {files.path}: {error}") from None


def _put(sites: AdapterSites, files: AdapterFiles) -> Adapter:
    pieces: dict[Place, list[Piece]] = {}
    for name, part in files.modules.items():
        site = sites.find(name)
        if site is None:
            raise ConfigError(f"the model has no linear layer {name} that can have an adapter")
        _check_shape(name, part, site.num_outputs, site.num_inputs)
        pieces.setdefault(site.place, []).append(_piece(sites, part, site))
    table = None
    for name, part in files.embeddings.items():
        if sites.table_shape is None or not sites.is_table(name):
            raise ConfigError(f"the model has no embedding {name} that can have an adapter")
        _check_shape(name, part, sites.table_shape[1], sites.table_shape[0])
        table = _piece(sites, part, Site(name, 0, *sites.table_shape[::-1]))
    for name, weight in files.base_weights.items():
        _compare(sites, name, weight)
    make_product, make_table = _makers(sites.products)
    return Adapter(
        {
            place: make_product(sorted(own, key=lambda piece: piece.begin))
            for place, own in pieces.items()
        },
        None if table is None else make_table(table),
        files.num_parameters * sites.dtype.itemsize,
    )


def _makers(
    products: Literal["torch", "kernels"],
) -> tuple[Callable[[Sequence[Piece]], LowRankProduct], Callable[[Piece], LowRankTable]]:
    if products == "torch":
        return TorchProduct, TorchTable
    from aioserve.features.lora import cpu_products

    return cpu_products.make_product, cpu_products.make_table


def _piece(sites: AdapterSites, part: LowRank, site: Site) -> Piece:
    a = part.a[:, site.inputs].to(sites.device, sites.dtype)
    b = (part.b[site.outputs].float() * part.scale).to(sites.device, sites.dtype)
    return Piece(site.begin, a, b)


def _compare(sites: AdapterSites, name: str, weight: Tensor) -> None:
    """PEFT saves the base model's weights of embeddings and heads with their adapters."""
    is_table = sites.is_table(name)
    site = None if is_table else sites.find(name)
    shape = sites.table_shape if is_table else site and (site.num_outputs, site.num_inputs)
    if shape is None or tuple(weight.shape) != tuple(shape):
        raise ConfigError(f"it brings a {name} {list(weight.shape)}, the model's is {shape}")
    weight = weight.to(sites.device, sites.dtype)
    if is_table:
        ids = torch.linspace(0, shape[0] - 1, _NUM_COMPARED, device=sites.device).long()
        own, other = sites.rows_of_table(ids), weight[ids]
    elif site is not None and name.endswith("lm_head"):
        count = min(_NUM_COMPARED, shape[1])
        unit = torch.eye(shape[1], dtype=sites.dtype, device=sites.device)[:count]
        other = weight[site.outputs, :count].T
        own = sites.head(unit)[:, : other.shape[1]]
    else:
        raise ConfigError(f"it brings weights of {name}: only those of adapters are served")
    if not (own - other).float().norm() <= _MOST_DIFFERENT * other.float().norm():
        raise ConfigError(f"it brings another {name} than the model's, which is not served")
