"""Forward passes of decode steps, captured once per padded size and replayed.

At small batches a step is bound by the launches of its hundreds of kernels; a replay is one
launch. Knows sizes and arrays; what a capture is, the device says.
"""

import logging
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from aioserve.runner.attention.backend import LayerAttention
from aioserve.support.progress import stage

logger = logging.getLogger(__name__)

Prepare = Callable[[int], LayerAttention]  # fills the arena with that number of rows
Forward = Callable[[int, LayerAttention], Tensor]  # logits [B, V] of the first B tokens of it
Capture = Callable[[Callable[[], None]], Callable[[], None]]


def capture_sizes(max_num_rows: int) -> tuple[int, ...]:
    """1, 2, 4, then by 8 to 64, then by 16 to 256, as far as a step may have rows; ascending."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16)]
    fitting = [size for size in sizes if size < max_num_rows]
    return (*fitting, min(max_num_rows, 256))


class DecodeGraphs:
    """Decode steps as CUDA graphs: one capture per padded number of rows, replayed in steps."""

    def __init__(self) -> None:
        self._replays: dict[int, Callable[[], None]] = {}
        self._logits: Tensor | None = None  # one for all sizes: only one is replayed at a time

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ascending; none if nothing is captured."""
        return tuple(sorted(self._replays))

    def capture(
        self,
        sizes: Iterable[int],
        prepare: Prepare,
        forward: Forward,
        capture: Capture,
    ) -> None:
        """Capture `forward` for each size, on what `prepare` has filled the arena with.

        Largest first: smaller ones then live in the memory of larger ones. What cannot be
        captured runs without graphs, and a log line says why.
        """

        def work(size: int, attention: LayerAttention) -> None:
            logits = forward(size, attention)
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            self._logits[:size] = logits

        for size in stage(sorted(sizes, reverse=True), "Capturing CUDA graphs", "size"):
            try:
                self._replays[size] = capture(partial(work, size, prepare(size)))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model does that cannot be recorded
                logger.warning("decode steps run without CUDA graphs: %s", error)
                self._replays.clear()
                return

    def replay(self, size: int) -> Tensor:
        """Logits [size, V]; valid until the next replay."""
        self._replays[size]()
        assert self._logits is not None
        return self._logits[:size]
