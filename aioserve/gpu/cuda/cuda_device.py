"""CUDA behind the seam of `device`: pinned memory, one stream, events, graphs.

Made on the thread that launches. The only module that calls `torch.cuda` in a step.
"""

from collections.abc import Callable, Iterable
from typing import Any

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

_PINNED_BYTES = 64 << 20  # at once: torch rounds each allocation up to a power of two
_WARM_UPS = 2  # before a capture: cuBLAS, Triton and lazily loaded modules allocate when first used


class PinnedBuffer(HostBuffer):
    """A host buffer in page-locked memory, which a CUDA device copies asynchronously."""

    def __init__(self, size: int) -> None:
        self._words = torch.empty(size, dtype=torch.int32, pin_memory=True)

    @property
    def tensor(self) -> Tensor:
        return self._words


class CudaEvent(Event):
    """A point in a CUDA stream; `wait` blocks the calling thread and releases the GIL."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


class CudaMoment(Moment):
    """A moment on a CUDA stream, as an event that records its time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()

    def since(self, earlier: Moment) -> float:
        assert isinstance(earlier, CudaMoment)
        seconds: float = 1e-3 * earlier.event.elapsed_time(self.event)
        return seconds


class PinnedSlot(HostSlot):
    """A slot for KV blocks in page-locked host memory, a row of a larger allocation."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    @property
    def tensor(self) -> Tensor:
        return self._memory


class CudaCopyQueue(CopyQueue):
    """A CUDA stream of its own, which copies blocks between host and device beside the steps."""

    def __init__(self, steps: torch.cuda.Stream) -> None:
        self._steps = steps
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def slots(self, count: int, num_bytes: int) -> list[PinnedSlot]:
        at_once, slots = max(1, _PINNED_BYTES // num_bytes), list[PinnedSlot]()
        while len(slots) < count:
            shape = min(at_once, count - len(slots)), num_bytes
            memory = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
            slots += map(PinnedSlot, memory)
        return slots

    def follow(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.event)

    def lead(self, moment: Moment) -> None:
        assert isinstance(moment, CudaMoment)
        self._steps.wait_event(moment.event)

    def save(self, slot: HostSlot, source: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            slot.tensor.copy_(source, non_blocking=True)

    def load(self, target: Tensor, slot: HostSlot) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(slot.tensor, non_blocking=True)

    def record(self) -> CudaMoment:
        return CudaMoment(self._stream)


class CudaDevice(Device):
    """The current device, on a stream of its own."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool: Any = None
        self.attach()

    def attach(self) -> None:
        torch.cuda.set_device(self.torch_device)
        torch.cuda.set_stream(self._stream)

    def lend(self) -> None:
        self.attach()

    def host_buffer(self, size: int) -> PinnedBuffer:
        return PinnedBuffer(size)

    def copy_queue(self) -> CudaCopyQueue:
        return CudaCopyQueue(self._stream)

    def stage(self, target: Tensor, source: HostBuffer) -> None:
        target.copy_(source.tensor[: len(target)], non_blocking=True)

    def launch(self, work: Callable[[], None]) -> None:
        work()

    def beside(self, work: Callable[[], Iterable[Tensor]]) -> None:
        with torch.cuda.stream(self._beside):
            for tensor in work():
                # it was made on another stream than that which reads it
                tensor.record_stream(self._stream)
        self._beside.synchronize()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        for _ in range(_WARM_UPS):
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # thread_local: the reading thread may wait for an event meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        replay: Callable[[], None] = graph.replay
        return replay

    def fetch(self, target: HostBuffer, source: Tensor) -> None:
        target.tensor[: len(source)].copy_(source, non_blocking=True)

    def record(self) -> CudaEvent:
        return CudaEvent(self._stream)

    def card(self) -> CardMemory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return CardMemory(torch.cuda.get_device_name(self.torch_device), total, free)

    def num_allocated(self) -> int:
        return torch.cuda.memory_allocated(self.torch_device)

    def measure(self, work: Callable[[], None]) -> int:
        before = self.num_allocated()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        work()
        self._stream.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def is_lost(self) -> bool:
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # an error of the context stays: every later call raises it, too
            return True
        return False
