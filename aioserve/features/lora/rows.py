"""Which adapters are loaded, and which row of the batch has which.

A row keeps its adapter whatever is unloaded meanwhile. Knows rows and requests' adapter ids; knows
nothing about models or files.
"""

from typing import TYPE_CHECKING

import numpy as np

from aioserve.features.lora.products import Adapter, AdapterOwners, AdapterSites
from aioserve.runner.attention.backend import ADAPTERS, StepInputs
from aioserve.runner.batch.input_batch import BatchPart
from aioserve.scheduler.output import NewRequestData, SchedulerOutput

if TYPE_CHECKING:
    from aioserve.features.lora.peft_directory import AdapterFiles


class AdapterRows(BatchPart[Adapter]):
    """Loaded adapters by id, and those of rows; which tokens of a step have which is
    `AdapterOwners`, if any has one.
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
            own = AdapterOwners(adapters, np.repeat(owners, np.diff(inputs.query_start_loc)))
            inputs.parts[self.name] = own
        return inputs


class LoadedAdapters:
    """Loads and drops LoRA adapters of a runner with a model and a batch."""

    def __init__(self, sites: AdapterSites, rows: AdapterRows) -> None:
        self._sites, self._rows = sites, rows

    def put(self, files: "AdapterFiles") -> Adapter:
        """Put an adapter where the model computes, from any thread; raises what `AdapterSites.put`
        raises.
        """
        return self._sites.put(files)

    def load(self, adapter_id: str, adapter: Adapter) -> None:
        """Requests of this adapter id may come from now on."""
        self._rows.loaded[adapter_id] = adapter

    @property
    def loaded(self) -> dict[str, Adapter]:
        """Loaded LoRA adapters, of which requests may come, by id."""
        return self._rows.loaded

    def unload(self, adapter_id: str) -> None:
        """Forget an adapter: no request of its id comes any more."""
        self._rows.loaded.pop(adapter_id, None)
