"""Which adapters are loaded, and which row of the batch has which.

A row keeps its adapter whatever is unloaded meanwhile. Knows rows and requests' adapter ids; knows
nothing about models or files.
"""

import numpy as np
import torch

from aioserve.runner.adapter_sites import AdapterSites
from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.runner.low_rank import Adapter, TokenAdapters
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

    def of(self, inputs: StepInputs, tokens: IntArray | None = None) -> TokenAdapters | None:
        """Those of the packed tokens of a step, in the order of `tokens` if that is another; None
        if nobody there has one.
        """
        if not self._rows:
            return None
        found: dict[int, tuple[int, Adapter]] = {}  # by identity: its place
        owners = np.full(len(inputs.rows), -1, dtype=np.int64)
        for index, row in enumerate(inputs.rows.tolist()):
            if (adapter := self._rows.get(row)) is not None:
                owners[index], _ = found.setdefault(id(adapter), (len(found), adapter))
        if not found:
            return None
        of_tokens = np.repeat(owners, np.diff(inputs.query_start_loc))
        if tokens is not None:
            of_tokens = of_tokens[tokens]
        adapters = [adapter for _, adapter in found.values()]
        return TokenAdapters(adapters, torch.from_numpy(of_tokens))


class LoadedAdapters:
    """What may be asked of whoever has a model and a batch."""

    def __init__(self, sites: AdapterSites, rows: AdapterRows) -> None:
        self.put = sites.put  # from any thread
        self._rows = rows

    def load(self, adapter_id: str, adapter: Adapter) -> None:
        """Requests of this adapter id may come from now on."""
        self._rows.loaded[adapter_id] = adapter

    def unload(self, adapter_id: str) -> None:
        """None will come any more."""
        self._rows.loaded.pop(adapter_id, None)
