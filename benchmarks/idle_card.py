"""A card that does nothing, so that what the host does for a step can be timed without a card.

    python benchmarks/card.py run --stages host --card idle_card:IdleCard

Copies, kernels, graphs and flashinfer's plans are no work here, and every sampled token is 0. The
host plans, stages and reads steps as for a real card.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from card_stages import REAL, Card
from torch import Tensor

from aioserve.gpu.cuda.device import CardMemory, CopyQueue, Device, Event, HostBuffer


class IdleBuffer(HostBuffer):
    """Memory of the host that nothing is copied from or to."""

    def __init__(self, size: int) -> None:
        self._words = torch.zeros(size, dtype=torch.int32)

    @property
    def tensor(self) -> Tensor:
        return self._words


class IdleEvent(Event):
    """A point behind no work."""

    def wait(self) -> None:
        pass


class IdleDevice(Device):
    """A device that has done everything at once, since it does nothing."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def attach(self) -> None:
        pass

    def lend(self) -> None:
        pass

    def host_buffer(self, size: int) -> IdleBuffer:
        return IdleBuffer(size)

    def copy_queue(self) -> CopyQueue:
        raise NotImplementedError("an idle card keeps no blocks outside the KV pool")

    def stage(self, target: Tensor, source: HostBuffer) -> None:
        pass

    def launch(self, work: Callable[[], None]) -> None:
        pass

    def beside(self, work: Callable[[], Iterable[Tensor]]) -> None:
        pass

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def fetch(self, target: HostBuffer, source: Tensor) -> None:
        pass

    def record(self) -> IdleEvent:
        return IdleEvent()

    def card(self) -> CardMemory:
        return CardMemory("an idle card", total=16 << 30, free=16 << 30)

    def num_allocated(self) -> int:
        return 1 << 20

    def measure(self, work: Callable[[], None]) -> int:
        return 1 << 20

    def is_lost(self) -> bool:
        return False


class IdleWrapper:
    """A wrapper of flashinfer whose plans cost nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def plan(self, **settings: Any) -> None:
        """Take a plan without doing anything about it."""


class IdleCard(Card):
    """The idle device, and flashinfer with idle wrappers."""

    amounts = REAL._replace(speed=REAL.speed._replace(clients=256))

    def __init__(self) -> None:
        module = ModuleType("flashinfer")
        names: Sequence[str] = ("BatchDecode", "BatchPrefill")
        members = {f"{name}WithPagedKVCacheWrapper": IdleWrapper for name in names}
        vars(module).update(members, __version__="0 (idle)")
        sys.modules["flashinfer"] = module

    @cached_property
    def device(self) -> IdleDevice:
        """The device that does nothing."""
        return IdleDevice()

    def driver(self) -> str:
        """Return that there is none."""
        return "none: the card is idle"

    def forbid_waiting(self, launches: Callable[[], object]) -> None:
        """Run `launches`, which can wait for nothing here."""
        launches()
