"""Adapters on a device: brought there beside the steps, as far as there is room.

With each step it is staged which of its rows have which adapter. Knows bytes and rows; what an
adapter is made of is known to `adapter_sites`.
"""

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from aioserve.errors import ConfigError
from aioserve.features.lora.peft_directory import AdapterFiles
from aioserve.features.lora.products import Adapter, LowRankOwners, LowRankTokens
from aioserve.features.lora.rows import AdapterRows, LoadedLowRank, put_on
from aioserve.gpu.cuda.device import Device
from aioserve.gpu.cuda.sampler import DeviceSampler
from aioserve.runner import interface
from aioserve.runner.adapters import AdapterSites, TokenAdapters
from aioserve.runner.batch.input_batch import BatchPart

MIB = 1 << 20


class DeviceAdapters(LoadedLowRank):
    """LoRA adapters that are loaded on a device, and its room for more."""

    def __init__(
        self, sites: AdapterSites, rows: BatchPart[Any], device: Device, room: int
    ) -> None:
        """`room`: bytes on the device that all of them may take."""
        assert isinstance(rows, AdapterRows), "of that part"
        super().__init__(sites, rows)
        self._device, self._room = device, room
        self._placed = WeakSet[Adapter]()  # while they live: unloaded ones may still have rows

    def put(self, files: interface.AdapterFiles) -> Adapter:
        """As `put_on`. Raises `ConfigError` too if there is no room."""
        assert isinstance(files, AdapterFiles), "read by that part"
        needed = files.num_parameters * self._sites.dtype.itemsize
        left = self._room - sum(adapter.num_bytes for adapter in self._placed)
        full = ConfigError(
            f"adapter {files.path} takes {needed / MIB:,.1f} MiB of the device, {left / MIB:,.1f} "
            "are left: lower gpu_memory_utilization, adapters.max_cpu_loras or the KV pool"
        )
        if needed > left:
            raise full
        made: list[Adapter] = []

        def work() -> Sequence[Tensor]:
            made.append(put_on(self._sites, files))
            return made[0].tensors

        try:
            self._device.beside(work)
        except torch.OutOfMemoryError as error:  # others take of the card, too
            raise full from error
        self._placed.add(made[0])
        return made[0]


def stage_adapters(
    owners: Sequence[LowRankOwners], sampler: DeviceSampler
) -> Sequence[TokenAdapters]:
    """Return each of `owners` on the device, by one copy. To be used when the device gets there."""
    groups = [one.groups() for one in owners]
    words = {
        f"{number} {place}": rows.astype(np.int64).view(np.int32)
        for number, own in enumerate(groups)
        for place, (_, rows) in enumerate(own)
    }
    staged = sampler.stage(words)
    return [
        LowRankTokens(
            [
                (adapter, staged[f"{number} {place}"].view(torch.int64))
                for place, (adapter, _) in enumerate(own)
            ]
        )
        for number, own in enumerate(groups)
    ]
