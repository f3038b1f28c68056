"""What ranks tell each other while they compute: sums, parts of rows, and what the first one found.

Over `torch.distributed`: by gloo on this machine's loopback, or by NCCL between its cards. Knows
tensors; knows nothing about models, steps, or how ranks come to life.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aioserve.errors import ConfigError, RunnerDeadError
from aioserve.gpu.tensor_parallel.plan import shares_heads
from aioserve.gpu.tensor_parallel.processes import in_a_line
from aioserve.model_source.info import ModelInfo
from aioserve.runner.ranks import Ranks

#: The variable by which `torch.distributed` is told on which interfaces gloo listens.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_REASON_BYTES = 1024  # of why a rank cannot do what all were to do


class SharedError(ConfigError):
    """Raised for what one rank could not do, and all ranks have left undone."""


class GroupedRanks(Ranks):
    """Ranks in a process group of `torch.distributed`."""

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
        super().__init__(rank, size, device or torch.device("cpu"))
        self._seconds = timeout
        store = distributed.FileStore(str(meeting), size)
        is_on_card = self.device.type == "cuda"
        kind = distributed.ProcessGroupNCCL if is_on_card else distributed.ProcessGroupGloo
        try:
            with nullcontext() if is_on_card else _GLOO_ON_LOOPBACK:
                self._group = kind(store, rank, size, timedelta(seconds=timeout))
            self.told_by_first([0])  # NCCL meets when something is said
        except RuntimeError as error:
            raise self._lost(error) from error

    def shares_heads(self, hf_config: Any) -> bool:
        return shares_heads(hf_config)

    def check_groups(self, info: ModelInfo) -> None:
        from aioserve.gpu.tensor_parallel.shard import check_groups

        check_groups(info, self.size)

    def share_out(self, module: nn.Module, dtype: torch.dtype) -> None:
        from aioserve.gpu.tensor_parallel.shard import shard

        shard(module, self, dtype)

    def add_up(self, x: Tensor) -> None:
        try:
            self._group.allreduce([x]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def join(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        try:
            self._group.allgather([parts], [x]).wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        return torch.cat(parts, dim=-1)

    def join_at_first(self, x: Tensor, width: int) -> Tensor:
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
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        try:
            self._group.broadcast([x], options).wait()
        except RuntimeError as error:
            raise self._lost(error) from error

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


class _GlooOnLoopback:
    """While a group is made, gloo listens on this machine's own interface alone. Without it, gloo
    takes the address that the machine's name has: one that others may reach, or none.

    Groups may be made on several threads at a time, which all wait for each other inside: the first
    that comes sets the variable, and the last that leaves gives it its value back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._before: str | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside > 1:
                return
            self._before = os.environ.get(GLOO_INTERFACE)
            loopback = (own for _, own in socket.if_nameindex() if own.startswith("lo"))
            os.environ[GLOO_INTERFACE] = next(loopback, "lo")

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside:
                return
            if self._before is None:
                os.environ.pop(GLOO_INTERFACE, None)
            else:
                os.environ[GLOO_INTERFACE] = self._before


_GLOO_ON_LOOPBACK = _GlooOnLoopback()
