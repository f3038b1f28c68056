"""What attention is given and must do, wherever it computes. No implementation here.

Begins with how far tokens of images see ahead, where those of one image see each other (Gemma 3,
Gemma 4).
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from aioserve.runner.adapters import AdapterOwners, TokenAdapters

IntArray = npt.NDArray[np.int64]

#: Keys of `StepInputs.parts`, which are names of parts of the batch: the adapters of its tokens,
#: prompts that are told their log probabilities, prompts that become vectors.
ADAPTERS, PROMPT_LOGPROBS, POOLED = "adapters", "prompt_logprobs", "pooling"


class ImageEnds(NamedTuple):
    """The number of positions of its row that each of the T tokens of a step sees, from the first
    one or, in layers with a sliding window, from the first one in the window of the token itself.
    """

    ends: IntArray  # T: to the token itself or, in an image, to the last token of the image
    only_in_windows: bool  # whether layers that have no window see what is before a token alone

    @classmethod
    def of(
        cls, positions: IntArray, places: Iterable[IntArray], *, only_in_windows: bool
    ) -> "ImageEnds | None":
        """Of the `positions` [T] of a step whose images are at `places`: ascending packed tokens,
        of each image all. Those without a gap between them see each other. None if there is none.
        """
        ends, is_any = positions + 1, False
        for own in places:
            gaps = np.flatnonzero(np.diff(own) != 1) + 1
            for part in np.split(own, gaps):
                ends[part] = positions[part[-1]] + 1
                is_any = True
        return cls(ends, only_in_windows) if is_any else None

    def within(self, window: int | None) -> IntArray | None:
        """`ends`, or None for a layer of that sliding window whose tokens do not see ahead."""
        return None if self.only_in_windows and window is None else self.ends


def ends_seen(image_ends: ImageEnds | None, positions: IntArray, window: int | None) -> IntArray:
    """[T] behind the last position that each token at `positions` [T] sees in such a layer."""
    ends = image_ends and image_ends.within(window)
    return positions + 1 if ends is None else ends


# What attention is given and must do, wherever it computes. No implementation here.


SCALE_BYTES = 4  # of a float32, behind the codes of K or V


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The packed arrays of one step: R rows (requests) with T tokens in all, row after row.

    On a CPU the next step of the same rows may be this very object, with other numbers in
    `input_ids`, `positions`, `slot_mapping`, `seq_lens` and `block_table`: what is derived from
    them is derived in each step.
    """

    req_ids: list[str]  # R, in the scheduler's order
    rows: IntArray  # R, rows of the persistent batch
    input_ids: IntArray  # T
    positions: IntArray  # T, restarting with every row
    slot_mapping: IntArray  # T, block_id * block_size + offset: where K and V of a token go
    query_start_loc: IntArray  # R + 1, first packed token of each row
    seq_lens: IntArray  # R, tokens whose K and V exist once this step has written its own
    block_table: npt.NDArray[np.int32]  # [R, W] block ids; unused entries hold any valid id
    sampling: IntArray  # S, which of the R rows sample a token
    logits_indices: IntArray  # S, the packed token whose logits they sample from
    #: Draft tokens by row of the batch: its last packed tokens. It is in S once more for each.
    drafts: dict[int, list[int]] = field(default_factory=dict)
    states: "Sequence[StatePieces]" = ()  # of a model with states
    given: "GivenRows | None" = None  # of a model that sees
    turns: IntArray | None = None  # T, by which heads turn; None: `positions`
    image_ends: ImageEnds | None = None  # of a step with images whose tokens see each other
    #: The step as layers see it that have blocks of their own: other slots, another table.
    windows: "StepInputs | None" = None
    #: What parts of the batch have found for the rows that asked, by the parts' names.
    parts: dict[str, Any] = field(default_factory=dict)


class StatePieces(NamedTuple):
    """B pieces of L tokens each."""

    tokens: IntArray  # [B, L] packed tokens
    sources: IntArray | None  # B, slots of the states before them; None: they begin texts
    slots: IntArray  # B, where the states behind them go
    copies: IntArray  # [2, C]: those places among B whose states go to these slots as well
    has_drafts: bool = False  # at the ends of all pieces, of which some may turn out wrong


class GivenRows(NamedTuple):
    """Rows with which some tokens enter the decoder in the place of its embedding's."""

    places: Tensor  # N of the T, int64
    rows: Tensor  # [N, hidden]
    axes: Tensor | None = None  # [3, N], by which their heads turn instead of a position
    deep: Sequence[Tensor] = ()  # [N, hidden] each, added to what leaves the first layers


class ModelInputs(NamedTuple):
    """The tensors of a step that a model reads: int64, on the device of its weights."""

    input_ids: Tensor  # T
    positions: Tensor  # T, by which heads turn
    slots: Tensor  # T, `slot_mapping`
    logits_rows: Tensor  # S, the packed tokens whose logits are wanted
    adapters: "TokenAdapters | None" = None  # of the T; None: no token has one
    logits_adapters: "TokenAdapters | None" = None  # of the S
    states: Sequence[StatePieces] = ()  # of a model with states
    given: GivenRows | None = None

    @classmethod
    def of(cls, step: StepInputs, owners: "AdapterOwners | None" = None) -> "ModelInputs":
        """On the CPU, where numpy and torch share memory."""
        turns = step.positions if step.turns is None else step.turns
        arrays = (step.input_ids, turns, step.slot_mapping, step.logits_indices)
        ids, positions, slots, rows = map(torch.from_numpy, arrays)
        adapters = of_logits = None
        if owners is not None:
            adapters = owners.on_cpu()
            of_logits = owners.take(step.logits_indices).on_cpu()
        return cls(ids, positions, slots, rows, adapters, of_logits, step.states, step.given)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """K and V of one attention layer, per token."""

    num_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    is_latent: bool = False  # V is the beginning of K, and is kept once (latent attention)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """All attention layers in the order in which the model runs them.

    With `dtype` int8 a number takes a byte, and the numbers of a token and head a scale besides.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype  # in which K and V are kept

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers."""
        elements = 0
        for layer in self.layers:
            own = 0 if layer.is_latent else self.row(layer.value_head_dim)
            elements += layer.num_kv_heads * (self.row(layer.key_head_dim) + own)
        return elements * self.dtype.itemsize

    def part(self, layers: Collection[int]) -> "KVCacheSpec":
        """Return the spec of the given layers alone, in ascending order, with the same dtype."""
        return KVCacheSpec(tuple(self.layers[layer] for layer in sorted(layers)), self.dtype)

    def row(self, head_dim: int) -> int:
        """Elements that K or V of a token and head take."""
        return head_dim + (SCALE_BYTES if self.dtype is torch.int8 else 0)


class WindowLayers(NamedTuple):
    """Layers of a model that have blocks of their own."""

    layers: frozenset[int]
    num_blocks: int


class AttentionOptions(NamedTuple):
    """The weights that a layer gives to what its tokens see."""

    scaling: float  # of scores
    sliding_window: int | None = None  # w: a token sees itself and the w - 1 before it
    softcap: float | None = None  # c: scores become c * tanh(score / c) (Gemma 2)
    # [Hq], a logit per head that takes part in the softmax and carries no value (gpt-oss)
    sinks: Tensor | None = None
    chunk: int | None = None  # c: a token sees what is in its own c positions (Llama 4)


class AttentionCall(NamedTuple):
    """The form in which one layer calls for attention."""

    num_heads: int
    options: AttentionOptions


class LayerAttention(ABC):
    """Attention as the layers of a model call it."""

    @abstractmethod
    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Store K and V of all T tokens, then let every token attend to its own past and itself.

        `query` is [T, Hq, Dk], `key` [T, Hkv, Dk], `value` [T, Hkv, Dv]; returns [T, Hq, Dv].
        Query head h reads KV head h // (Hq // Hkv).
        """


class Row(NamedTuple):
    """The place of one request among the packed tokens of a step."""

    begin: int  # of its packed tokens
    end: int
    seq_len: int  # tokens that it has with these


class RowStates(ABC):
    """K and V of whole rows, for models that compute attention themselves.

    A layer's are [T, n] and [T, m], whatever heads they are: `LayerSpec(1, n, m)`.
    """

    @abstractmethod
    def prepare(self, step: StepInputs) -> None:
        """Note the step that the calls which follow are about."""

    @property
    @abstractmethod
    def rows(self) -> list[Row]:
        """The rows of the step that was prepared last, one per request."""

    @abstractmethod
    def extend(self, layer: int, row: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store what the tokens of a row in this step have, and return what it has now:
        [seq_len, n] and [seq_len, m].
        """
