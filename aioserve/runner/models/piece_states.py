"""What a layer with states keeps between tokens, as its module reads and writes it for one piece.

Knows the cache interface of `transformers` that such modules call. Knows no slots.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class StateKey(NamedTuple):
    """One of a layer's states."""

    kind: str  # "conv" or "recurrent"
    number: int  # a layer may have several


class StateSpec(NamedTuple):
    """The shape of one state of one request."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one state slot."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class PieceStates:
    """What a module takes for its cache while it computes B pieces: `transformers`' calls."""

    def __init__(self, states: dict[StateKey, Tensor] | None = None) -> None:
        """`states` [B, ...]; None: the pieces begin their texts."""
        self.states = {} if states is None else states
        self.widths: dict[int, int] = {}  # of convolutions

    def get_conv_state(self, layer_idx: int = 0, state_idx: int = 0) -> Tensor | None:
        """[B, channels, width] of the last inputs."""
        return self.states.get(StateKey("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int = 0, state_idx: int = 0) -> Tensor | None:
        """The recurrent states of the B pieces, [B, ...]; None at the beginning of their texts."""
        return self.states.get(StateKey("recurrent", state_idx))

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        """Never: what takes drafts back computes the states again."""
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int = 0,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Take in new inputs [B, channels, n]; returns the ones before and these."""
        key = StateKey("conv", state_idx)
        known = self.states.get(key)
        if known is None:
            width = conv_kernel_size or conv_states.shape[-1]
            whole = F.pad(conv_states, (max(width - conv_states.shape[-1], 0), 0))
        else:
            width = known.shape[-1]
            parts = [known.transpose(1, 2), conv_states.transpose(1, 2)]
            whole = torch.cat(parts, dim=1).transpose(1, 2)  # in memory token by token, as new ones
        self.states[key] = whole[..., -width:]
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int = 0, state_idx: int = 0
    ) -> Tensor:
        """Replace the recurrent states of the B pieces by these, and return them."""
        self.states[StateKey("recurrent", state_idx)] = recurrent_states
        return recurrent_states

    # As MiniMax calls it.
    get_linear_cache = get_recurrent_state

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        """Replace the recurrent states of the B pieces, under the name that MiniMax calls."""
        self.update_recurrent_state(state)
