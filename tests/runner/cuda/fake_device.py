"""A device that computes on the CPU as late as a real one might, and notices who is too early.

Work runs when somebody waits for an event after it, or by chance when something is queued. A host
buffer that the device still has to read or write may not be touched.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from aioserve.gpu.cuda.device import (
    CardMemory,
    CopyQueue,
    Device,
    Event,
    HostBuffer,
    HostSlot,
    Moment,
)


class TooEarlyError(AssertionError):
    """The host touched memory that the device has not finished with."""


class FakeBuffer(HostBuffer):
    def __init__(self, size: int) -> None:
        self.words = torch.full((size,), 1 << 30, dtype=torch.int32)
        self.num_pending = 0

    @property
    def tensor(self) -> Tensor:
        if self.num_pending:
            raise TooEarlyError(f"{self.num_pending} copies of this buffer are still queued")
        return self.words


class FakeEvent(Event):
    def __init__(self, device: "FakeDevice", number: int) -> None:
        self._device = device
        self.number = number

    def wait(self) -> None:
        self._device.linger()
        self._device.advance(self.number)


class FakeSlot(HostSlot):
    def __init__(self, num_bytes: int) -> None:
        self.bytes = torch.full((num_bytes,), 0xEE, dtype=torch.uint8)
        self.num_pending = 0

    @property
    def tensor(self) -> Tensor:
        if self.num_pending:
            raise TooEarlyError(f"{self.num_pending} copies of this slot are still queued")
        return self.bytes


class FakeMoment(Moment):
    def __init__(self, queue: "FakeCopyQueue") -> None:
        self.queue = queue
        self.time: float | None = None
        self.number = queue.put(self._pass)

    def _pass(self) -> None:
        self.time = time.perf_counter()

    def wait(self) -> None:
        self.queue.reach(self.number)

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, FakeMoment)
        assert self.time is not None
        assert earlier.time is not None
        return self.time - earlier.time


class FakeCopyQueue(CopyQueue):
    """As late, and as eager, as its device."""

    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self._queue: deque[Callable[[], None]] = deque()
        self._num_queued = self._num_done = 0

    def slots(self, count: int, num_bytes: int) -> list[FakeSlot]:
        return [FakeSlot(num_bytes) for _ in range(count)]

    def follow(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        self.put(lambda: self._device.reach(event.number))

    def lead(self, moment: Moment) -> None:
        self._device.put(moment.wait)

    def save(self, slot: HostSlot, source: Tensor) -> None:
        assert isinstance(slot, FakeSlot)
        self._copy(slot, slot.bytes, source)

    def load(self, target: Tensor, slot: HostSlot) -> None:
        assert isinstance(slot, FakeSlot)
        self._copy(slot, target, slot.bytes)

    def record(self) -> FakeMoment:
        return FakeMoment(self)

    def put(self, work: Callable[[], None]) -> int:
        """Which piece of work it is."""
        with self._device.lock, torch.inference_mode():
            self._queue.append(work)
            self._num_queued += 1
            number = self._num_queued
            while self._queue and self._device.has_luck():
                self._do_one()
        return number

    def reach(self, number: int) -> None:
        """Have the first `number` pieces of work done."""
        with self._device.lock, torch.inference_mode():
            while self._num_done < number:
                self._do_one()

    def _copy(self, slot: FakeSlot, target: Tensor, source: Tensor) -> None:
        def run() -> None:
            target.copy_(source)
            slot.num_pending -= 1

        with self._device.lock:
            slot.num_pending += 1
        self.put(run)

    def _do_one(self) -> None:
        self._num_done += 1
        self._queue.popleft()()


class FakeDevice(Device):
    """`eagerness`: how likely the device gets a piece of work done whenever one is queued.
    `slowness`: seconds that it takes at most to begin, unless it has a second step to do by then.
    """

    def __init__(self, seed: int = 0, eagerness: float = 0.2, slowness: float = 0.0) -> None:
        self.torch_device = torch.device("cpu")
        self.fail_with: Exception | None = None  # the next launch, when the device gets there
        self.lost = False
        self.num_attached = self.num_lent = 0
        self._launching: int | None = None  # the thread that attached last
        self.num_behind = 0  # most launches that were ever queued and not done
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._queue: deque[Callable[[], None]] = deque()
        self._num_queued = self._num_done = self._num_launches = 0
        self._errors: dict[int, Exception] = {}
        self.lock = threading.RLock()
        self._slowness = slowness
        self._launched = threading.Condition(self.lock)

    def attach(self) -> None:
        self.num_attached += 1
        self._launching = threading.get_ident()

    def lend(self) -> None:
        assert threading.get_ident() != self._launching, "it launches in any case"
        self.num_lent += 1

    def host_buffer(self, size: int) -> FakeBuffer:
        return FakeBuffer(size)

    def copy_queue(self) -> FakeCopyQueue:
        return FakeCopyQueue(self)

    def stage(self, target: Tensor, source: HostBuffer) -> None:
        assert isinstance(source, FakeBuffer)
        self._copy(target, source.words[: len(target)], source)

    def fetch(self, target: HostBuffer, source: Tensor) -> None:
        assert isinstance(target, FakeBuffer)
        self._copy(target.words[: len(source)], source, target)

    def launch(self, work: Callable[[], None]) -> None:
        error, self.fail_with = self.fail_with, None

        def run() -> None:
            self._num_launches -= 1
            if error is not None:
                raise error
            work()

        with self.lock:
            self._num_launches += 1
            self.num_behind = max(self.num_behind, self._num_launches)
            self._launched.notify_all()
        self.put(run)

    def beside(self, work: Callable[[], Iterable[Tensor]]) -> None:
        assert threading.get_ident() != self._launching, "it would keep the next step waiting"
        for tensor in work():
            assert tensor.device == self.torch_device

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.advance(self._num_queued)
        work()
        return work

    def record(self) -> FakeEvent:
        return FakeEvent(self, self._num_queued)

    def card(self) -> CardMemory:
        return CardMemory("a fake device", total=4 << 30, free=4 << 30)

    def num_allocated(self) -> int:
        return 1 << 20

    def measure(self, work: Callable[[], None]) -> int:
        work()
        return 2 << 20

    def is_lost(self) -> bool:
        return self.lost

    def linger(self) -> None:
        """What the reading thread waits for is not done at once."""
        if self._slowness and threading.get_ident() != self._launching:
            with self._launched:
                self._launched.wait_for(lambda: self._num_launches > 1, self._slowness)

    def advance(self, number: int) -> None:
        """Do the first `number` pieces of work; raise what the last launch among them raised."""
        with self.lock:
            self.reach(number)
            failed = [n for n in self._errors if n <= number]
            if failed:
                raise self._errors.pop(failed[-1])

    def reach(self, number: int) -> None:
        """The same, raising nothing."""
        with self.lock, torch.inference_mode():
            while self._num_done < number:
                self._do_one()

    def forget_errors(self) -> None:
        """Those of steps that had failed already."""
        with self.lock:
            self._errors.clear()

    def has_luck(self) -> bool:
        """Whether the device gets one more piece of work done just now."""
        return self._random.random() < self._eagerness

    def _copy(self, target: Tensor, source: Tensor, buffer: FakeBuffer) -> None:
        def run() -> None:
            target.copy_(source)
            buffer.num_pending -= 1

        with self.lock:
            buffer.num_pending += 1
        self.put(run)

    def put(self, work: Callable[[], None]) -> None:
        with self.lock, torch.inference_mode():
            self._queue.append(work)
            self._num_queued += 1
            while self._queue and self.has_luck():
                self._do_one()

    def _do_one(self) -> None:
        self._num_done += 1
        try:
            self._queue.popleft()()
        except Exception as error:
            self._errors[self._num_done] = error
