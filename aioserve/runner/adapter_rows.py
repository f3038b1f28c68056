"""Which adapters are loaded, and which row of the batch has which.

A row keeps its adapter whatever is unloaded meanwhile. Knows rows and requests' adapter ids; knows
nothing about models or files.
"""

import numpy as np

from aioserve.model_source.adapter import AdapterFiles
from aioserve.runner.adapter_sites import AdapterSites
from aioserve.runner.attention.backend import StepInputs
from aioserve.runner.low_rank import Adapter, AdapterOwners
from aioserve.scheduler.output import NewRequestData


class AdapterRows:
    """Loaded adapters by id, and those of rows."""

    def __init__(self) -> None:
        self.loaded: dict[str, Adapter] = {}
        self._rows: dict[int, Adapter] = {}

    def set(self, row: int, request: NewRequestData) -> None:
        """Enter a request. Raises `KeyError` if its adapter is not loaded."""
        if request.adapter_id:
            self._rows[row] = self.loaded[request.adapter_id]

    def drop(self, row: int) -> None:
        """Forget the request of a row."""
        self._rows.pop(row, None)

    def of(self, inputs: StepInputs) -> AdapterOwners | None:
        """Those of the packed tokens of a step; None if nobody there has one."""
        if not self._rows:
            return None
        found: dict[int, tuple[int, Adapter]] = {}  # by identity: its place
        owners = np.full(len(inputs.rows), -1, dtype=np.int64)
        for index, row in enumerate(inputs.rows.tolist()):
            if (adapter := self._rows.get(row)) is not None:
                owners[index], _ = found.setdefault(id(adapter), (len(found), adapter))
        if not found:
            return None
        adapters = [adapter for _, adapter in found.values()]
        return AdapterOwners(adapters, np.repeat(owners, np.diff(inputs.query_start_loc)))


class LoadedAdapters:
    """What may be asked of whoever has a model and a batch."""

    def __init__(self, sites: AdapterSites, rows: AdapterRows) -> None:
        self._sites, self._rows = sites, rows

    def put(self, files: AdapterFiles) -> Adapter:
        """As `AdapterSites.put`, from any thread."""
        return self._sites.put(files)

    def load(self, adapter_id: str, adapter: Adapter) -> None:
        """Requests of this adapter id may come from now on."""
        self._rows.loaded[adapter_id] = adapter

    def unload(self, adapter_id: str) -> None:
        """None will come any more."""
        self._rows.loaded.pop(adapter_id, None)
