"""What one rank of a model asks of the others: sums, parts of rows, and its share of the weights.

A model may be shared out over several ranks, processes of which each has some of its weights. The
core computes with a share, and knows of the ranks what is said here; how they meet and talk, and
which weights each of them has, is known by the part that brings them. Knows tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from aioserve.model_source.info import ModelInfo


class Ranks(ABC):
    """One of `size` ranks. All of them call the same, in the same order, on the same shapes.

    Every method that talks to others raises `RunnerDeadError` if another rank has left, or does not
    answer.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """`device` is where the tensors of this rank are."""
        self.rank, self.size, self.device = rank, size, device

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that is asked and answers."""
        return self.rank == 0

    # Which weights are here.

    def share(self, whole: int) -> slice:
        """Return which part of `whole` equal parts this rank has; `whole` is a multiple of
        `size`.
        """
        part = whole // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def padded_share(self, whole: int) -> slice:
        """Return which part of `whole` parts this rank has; the last ranks may have fewer,
        or none.
        """
        part = -(-whole // self.size)
        return slice(min(self.rank * part, whole), min((self.rank + 1) * part, whole))

    @abstractmethod
    def shares_heads(self, hf_config: Any) -> bool:
        """Return whether a rank has some of the heads of a model, with their K and V; else it has
        all.
        """

    @abstractmethod
    def check_groups(self, info: ModelInfo) -> None:
        """Raise `ConfigError` that names a layer of quantized weights of whose inputs a rank would
        get a part of a group.
        """

    @abstractmethod
    def share_out(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Leave `module`, a causal language model of `transformers`, the weights of this rank, as
        `dtype`; for what it lacks it asks the others. Raises `ConfigError`.
        """

    # What ranks tell each other.

    @abstractmethod
    def add_up(self, x: Tensor) -> None:
        """Replace `x`, contiguous, by its sum over all ranks: the same bits on each."""

    @abstractmethod
    def join(self, x: Tensor) -> Tensor:
        """`x` [..., n] of all ranks side by side, [..., size * n]."""

    @abstractmethod
    def join_at_first(self, x: Tensor, width: int) -> Tensor:
        """Return the first `width` columns of `join`, for the first rank; zeros for the others."""

    @abstractmethod
    def tell(self, x: Tensor) -> None:
        """Replace `x`, contiguous, by what it is on the first rank."""

    @abstractmethod
    def together(self) -> AbstractContextManager[None]:
        """Return what the block does has failed on all ranks if it has on one: raises `ConfigError`
        with the reason of the first that has one. The block itself asks the others for nothing.
        """

    def told_by_first(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers that the first rank has said; what the others say does not count."""
        told = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        self.tell(told)
        found: list[float] = told.tolist()
        return found

    def chosen_by_first(self, choose: Callable[[], int]) -> int:
        """Return what `choose` returns on the first rank, where alone it is called. Raises
        `ConfigError` if it raises there.
        """
        with self.together():
            chosen = choose() if self.is_first else 0
        return int(self.told_by_first([chosen])[0])

    def least(self, number: int) -> int:
        """Return the least of the numbers that all ranks say."""
        own = torch.tensor([number], dtype=torch.float64, device=self.device)
        return int(self.join(own).min())


def together(ranks: Ranks | None) -> AbstractContextManager[None]:
    """Return `Ranks.together` of several ranks; of one, a context that does nothing."""
    return nullcontext() if ranks is None else ranks.together()
