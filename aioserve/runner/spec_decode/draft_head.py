"""Heads that draft from states of the served model: what EAGLE heads and MTP layers have in common.

Knows tensors and attention; knows nothing about requests.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from aioserve.runner.attention.backend import AttentionCall, KVCacheSpec, LayerAttention


class DraftHead(ABC):
    """A few layers that go on from what the served model thought of its tokens."""

    kv_cache_spec: KVCacheSpec
    attention_calls: tuple[AttentionCall, ...]
    device: torch.device
    num_parameters: int
    state_size: int  # numbers that it reads of the served model for each token

    @abstractmethod
    def combine(self, states: Tensor) -> Tensor:
        """One state [T, hidden] of what the served model gave, [T, `state_size`]."""

    @abstractmethod
    def forward(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, attention: LayerAttention
    ) -> Tensor:
        """The states [T, hidden] that continue `states` [T, hidden] with `token_ids` [T], each the
        one after its state's own. `attention` is that of the step, on the cache of this head.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Logits [N, V] of any of those states."""
