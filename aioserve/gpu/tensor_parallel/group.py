"""What ranks tell each other while they compute: sums, parts of rows, and what the first one found.

Over `torch.distributed`: by gloo on this machine's loopback, or by NCCL between its cards. Knows
tensors; knows nothing about models, steps, or how ranks come to life.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aioserve.errors import ConfigError, RunnerDeadError
from aioserve.gpu.tensor_parallel.processes import in_a_line

#: The variable by which `torch.distributed` is told on which interfaces gloo listens.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_REASON_BYTES = 1024  # of why a rank cannot do what all were to do


class SharedError(ConfigError):
    """What one rank could not do, and all ranks have left undone."""


class Ranks:
    """One of `size` ranks. All of them call the same, in the same order, on the same shapes.

    Every method raises `RunnerDeadError` if another rank has left, or does not answer.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        meeting: Path,
        timeout: float,
        device: torch.device | None = None,
    ) -> None:
        """Returns when all have come. `meeting`: a file that does not exist yet, one for all.
        `timeout`: seconds to wait for another rank, which may have a layer of a long prompt to
        compute, or a model to read. One that dies is noticed at once; this is for one that hangs.
        `device`: where the tensors of this rank are, if not on the CPU; on a card, work on them is
        queued there.
        """
        import torch.distributed

        distributed: Any = torch.distributed  # its stubs tell little
        self.rank, self.size, self._seconds = rank, size, timeout
        self.device = device = device or torch.device("cpu")
        store = distributed.FileStore(str(meeting), size)
        is_on_card = device.type == "cuda"
        kind = distributed.ProcessGroupNCCL if is_on_card else distributed.ProcessGroupGloo
        try:
            with nullcontext() if is_on_card else _gloo_on_loopback():
                self._group = kind(store, rank, size, timedelta(seconds=timeout))
            self.told_by_first([0])  # NCCL meets when something is said
        except RuntimeError as error:
            raise self._lost(error) from error

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that is asked and answers."""
        return self.rank == 0

    def share(self, whole: int) -> slice:
        """Which part of `whole` equal parts this rank has; `whole` is a multiple of `size`."""
        part = whole // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def padded_share(self, whole: int) -> slice:
        """The same of any `whole`: the last parts may be smaller, or empty."""
        part = -(-whole // self.size)
        return slice(min(self.rank * part, whole), min((self.rank + 1) * part, whole))

    def add_up(self, x: Tensor) -> None:
        """Replace `x`, contiguous, by its sum over all ranks: the same bits on each."""
        try:
            self._group.allreduce([x]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def join(self, x: Tensor) -> Tensor:
        """`x` [..., n] of all ranks side by side, [..., size * n]."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        try:
            self._group.allgather([parts], [x]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return torch.cat(parts, dim=-1)

    def join_at_first(self, x: Tensor, width: int) -> Tensor:
        """The first `width` columns of `join`, for the first rank; zeros for the others."""
        from torch.distributed import GatherOptions

        shape = (*x.shape[:-1], width)
        if not x.numel():
            return x.new_empty(shape)
        options = GatherOptions()
        options.rootRank = 0
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size if self.is_first else 0)]
        try:
            self._group.gather([parts] if parts else [], [x], options).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return torch.cat(parts, dim=-1)[..., :width] if parts else x.new_zeros(1).expand(shape)

    def tell(self, x: Tensor) -> None:
        """Replace `x`, contiguous, by what it is on the first rank."""
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            self._group.broadcast([x], options).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def told_by_first(self, numbers: Sequence[float]) -> list[float]:
        """The numbers that the first rank has said; what the others say does not count."""
        told = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        self.tell(told)
        found: list[float] = told.tolist()
        return found

    def chosen_by_first(self, choose: Callable[[], int]) -> int:
        """What `choose` returns on the first rank, where alone it is called. Raises `SharedError`
        if it raises there.
        """
        with self.together():
            chosen = choose() if self.is_first else 0
        return int(self.told_by_first([chosen])[0])

    def least(self, number: int) -> int:
        """The least of the numbers that all ranks say."""
        own = torch.tensor([number], dtype=torch.float64, device=self.device)
        return int(self.join(own).min())

    @contextmanager
    def together(self) -> Iterator[None]:
        """What the block does has failed on all ranks if it has on one: raises `SharedError`, with
        the reason of the first that has one. The block itself asks the others for nothing.
        """
        error: Exception | None = None
        try:
            yield
        except RunnerDeadError:
            raise
        except Exception as own:
            error = own
        reason = "" if error is None else in_a_line(error)
        told = torch.zeros(_REASON_BYTES, dtype=torch.uint8)
        content = torch.frombuffer(
            bytearray(reason.encode()[:_REASON_BYTES] or b"\0"), dtype=torch.uint8
        )
        told[: len(content)] = content
        reasons = self.join(told.to(self.device)).view(self.size, -1).cpu().numpy()
        for rank, own_bytes in enumerate(reasons):
            if text := own_bytes.tobytes().rstrip(b"\0").decode(errors="ignore"):
                raise SharedError(text if rank == 0 else f"rank {rank}: {text}") from error

    def leave(self) -> None:
        """Wait for no other rank any more: what is queued on a card fails. From any thread."""
        if self.device.type == "cuda":
            self._group.abort()

    def _lost(self, error: RuntimeError) -> RunnerDeadError:
        what = f"another rank has left, or has not answered for {self._seconds:g} s"
        return RunnerDeadError(f"{what} (runner.rank_timeout): {error}".partition("\n")[0])


def together(ranks: Ranks | None) -> AbstractContextManager[None]:
    """`Ranks.together`, if there are several."""
    return nullcontext() if ranks is None else ranks.together()


@contextmanager
def _gloo_on_loopback() -> Iterator[None]:
    """Inside the block gloo listens on this machine's own interface alone. Without it, gloo takes
    the address that the machine's name has: one that others may reach, or none.
    """
    before = os.environ.get(GLOO_INTERFACE)
    loopback = (own for _, own in socket.if_nameindex() if own.startswith("lo"))
    os.environ[GLOO_INTERFACE] = next(loopback, "lo")
    try:
        yield
    finally:
        if before is None:
            del os.environ[GLOO_INTERFACE]
        else:
            os.environ[GLOO_INTERFACE] = before
