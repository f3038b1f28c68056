"""What a step needs of a device: host buffers, one queue of work, events. No implementation here.

`cuda_device.CudaDevice` is the real one; the tests have one that computes late on the CPU.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CardMemory:
    """A device's memory, in bytes."""

    name: str
    total: int
    free: int

    def budget(self, utilization: float) -> int:
        """Return what may still be taken, if that share of all of it may be in use."""
        return int(self.total * utilization) - (self.total - self.free)


class HostBuffer(ABC):
    """Words of the host's memory that the device copies from, or to, when it gets there."""

    @property
    @abstractmethod
    def tensor(self) -> Tensor:
        """int32. Only to be touched before it is handed to the device, and after its event."""

    @property
    def array(self) -> npt.NDArray[np.int32]:
        """The memory of `tensor` as an array of numpy."""
        array: npt.NDArray[np.int32] = self.tensor.numpy()
        return array


class Event(ABC):
    """A point in the device's queue."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until all work before this point is done. Raises what that work raised."""


class Moment(Event):
    """A point in the queue of copies."""

    @abstractmethod
    def since(self, earlier: "Moment") -> float:
        """Return seconds from that one to this one, which have passed."""


class HostSlot(ABC):
    """Bytes of the host's memory that are copied beside the steps."""

    @property
    @abstractmethod
    def tensor(self) -> Tensor:
        """uint8. Only to be touched while no copy from or to it is queued."""


class CopyQueue(ABC):
    """A second queue of a device, done in order beside that of its steps. Used from the thread that
    launches, but for `slots`.
    """

    @abstractmethod
    def slots(self, count: int, num_bytes: int) -> Sequence[HostSlot]:
        """`count` slots of `num_bytes` each. Raises `RuntimeError` if the host lacks the memory."""

    @abstractmethod
    def follow(self, event: Event) -> None:
        """Do what is queued here from now on after that point of the device's queue."""

    @abstractmethod
    def lead(self, moment: Moment) -> None:
        """Do what is queued for steps from now on after that moment."""

    @abstractmethod
    def save(self, slot: HostSlot, source: Tensor) -> None:
        """Queue a copy of bytes on the device to the host."""

    @abstractmethod
    def load(self, target: Tensor, slot: HostSlot) -> None:
        """Queue a copy of bytes of the host to the device."""

    @abstractmethod
    def record(self) -> Moment:
        """Return the point after everything that is queued here now."""


class Device(ABC):
    """One queue of work, done in order, not when it is queued. Used from one thread, but for
    `Event.wait` and `beside`.
    """

    torch_device: torch.device

    @abstractmethod
    def attach(self) -> None:
        """Let this thread be the one that launches."""

    @abstractmethod
    def lend(self) -> None:
        """Let this thread launch as well, while the one that launches waits for it."""

    @abstractmethod
    def host_buffer(self, size: int) -> HostBuffer:
        """`size` int32 that copies to and from the device need not wait for."""

    @abstractmethod
    def copy_queue(self) -> CopyQueue:
        """Make a new queue for copies that run beside the steps."""

    @abstractmethod
    def stage(self, target: Tensor, source: HostBuffer) -> None:
        """Queue a copy of the beginning of `source` into `target` on the device."""

    @abstractmethod
    def launch(self, work: Callable[[], None]) -> None:
        """Queue `work`, which reads and writes tensors on the device and nothing else."""

    @abstractmethod
    def beside(self, work: Callable[[], Iterable[Tensor]]) -> None:
        """Do `work` now, on any thread, beside the queue. What it returns may be used by what is
        queued from then on, and its memory is not reused before the last of that is done.
        """

    @abstractmethod
    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Do `work` now and return what does it again, on the same tensors, at less cost."""

    @abstractmethod
    def fetch(self, target: HostBuffer, source: Tensor) -> None:
        """Queue a copy of `source` from the device into the beginning of `target`."""

    @abstractmethod
    def record(self) -> Event:
        """Return the point after everything that is queued now."""

    @abstractmethod
    def card(self) -> CardMemory:
        """Return the memory as it is now."""

    @abstractmethod
    def num_allocated(self) -> int:
        """Return the bytes of device memory that tensors take now."""

    @abstractmethod
    def measure(self, work: Callable[[], None]) -> int:
        """Do `work`; return the most bytes in tensors while it ran, beyond those before it."""

    @abstractmethod
    def is_lost(self) -> bool:
        """After an error: whether no further work can run."""


class StagingRing:
    """Two host buffers in turn: one is written while the device may still read the other."""

    def __init__(self, device: Device, size: int) -> None:
        self._device = device
        self._buffers: deque[tuple[HostBuffer, Event | None]] = deque()
        for _ in range(2):
            self._buffers.append((device.host_buffer(size), None))

    def take(self) -> HostBuffer:
        """Return the older buffer, once the device has read it."""
        buffer, guard = self._buffers[0]
        if guard is not None:
            guard.wait()
        return buffer

    def guard(self) -> None:
        """Note that what was queued up to now reads the buffer that was taken last."""
        buffer, _ = self._buffers.popleft()
        self._buffers.append((buffer, self._device.record()))
