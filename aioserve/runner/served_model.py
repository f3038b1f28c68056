"""What the runner needs from a model, whichever tier computes it: a name, sizes, logits.

Of a model in two halves, also the hidden states between them. Three implementations:
`loader.AnyModel` (modules of `transformers` as they are), `row_by_row.RowByRowModel` (the same with
attention of their own) and `fused.FusedModel` (our own loop over the layers). Knows nothing about
requests.
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from aioserve.runner.attention.backend import (
    AttentionCall,
    KVCacheSpec,
    LayerAttention,
    ModelInputs,
    StatePieces,
)

if TYPE_CHECKING:  # what few models need, or what brings `transformers`
    from aioserve.runner.adapters import AdapterSites, TokenAdapters
    from aioserve.runner.batch.input_batch import EncoderPart


def _keep_nothing(slots: Tensor, states: Tensor) -> None:
    """Drop the states; the default of `Taps.keep`, until a draft head takes them."""


@dataclass(slots=True)
class Taps:
    """Inner states of a model, for a draft head that builds on them."""

    layers: tuple[int, ...]
    #: Told in every pass, where it computes: the slots of its T tokens, and what entered the
    #: layers, [layers, T, hidden], which is not to be held on to.
    keep: Callable[[Tensor, Tensor], None] = _keep_nothing


class LayerStates(ABC):
    """The layers with states of one model. Without `used`, they compute what they are given as one
    new text.
    """

    num_slots = 0

    @abstractmethod
    def __len__(self) -> int:
        """Return how many layers have states."""

    @abstractmethod
    def __contains__(self, module: nn.Module) -> bool:
        """Return whether it is one of these layers or in one."""

    @property
    @abstractmethod
    def bytes_per_slot(self) -> int:
        """The states of one request, in all layers; known after `probing`."""

    @property
    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """The states of all slots, [num_slots, ...], layer by layer; known after `allocate`."""

    @abstractmethod
    def probing(self) -> AbstractContextManager[None]:
        """See in a forward pass which states there are."""

    @abstractmethod
    def allocate(self, num_slots: int) -> None:
        """Make room for `num_slots` states of each layer; memory is taken as they are written."""

    @abstractmethod
    def used(self, pieces: Sequence[StatePieces]) -> AbstractContextManager[None]:
        """While a forward pass runs over these pieces."""

    @abstractmethod
    def take_back(self, num_wrong: Mapping[int, int]) -> None:
        """Drafts at the ends of pieces of the newest step were wrong; `num_wrong` has their number
        by slot.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the memory of the states back. Idempotent."""


class ServedModel(ABC):
    """Weights in evaluation mode, and what their attention layers look like."""

    name: str  # of the architecture, with the tier that computes it
    num_parameters: int  # tied ones counted once
    kv_cache_spec: KVCacheSpec
    attention_calls: tuple[AttentionCall, ...]  # as many
    is_compiled = False  # whether our own kernels compute all of it
    is_stored = False  # whether they multiply with all quantized weights as these are
    #: As long as a step has fewer tokens than this, and each request at most 16 of them, a token's
    #: logits are to the bit what they would be in steps of one token.
    alone_below: float = 0
    own: Sequence[Callable[..., Tensor]] = ()  # products and experts by them, if it is not fused
    states: LayerStates | None = None  # of layers that have some
    embedding: Callable[[Tensor], Tensor] | None = None  # token ids [T] -> [T, hidden], if told
    reads_rows = False  # whether the `attention` that it is given must be `RowStates`
    adapter_sites: "AdapterSites"
    image_encoder: "EncoderPart | None" = None  # of one that sees

    @abstractmethod
    def forward(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        """Logits [S, V] of the rows that sample. `attention` is that of the step of `inputs`.

        The caller must not change the logits in place, as `kernels.tokens.LogitMaxima` may be
        attached to them, and the token would be chosen by the maxima from before the change.
        """

    @property
    def halves(self) -> "Halves | None":
        """This model split into backbone and head; None if that is not possible."""
        return None

    def tap(self, layers: Sequence[int]) -> Taps | None:
        """Tell what enters `layers` from now on; None if that cannot be had."""
        del layers
        return None


class Halves(ABC):
    """A model that can be asked for its hidden states, and then for logits of some of them."""

    @abstractmethod
    def hidden(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        """Return the hidden states [S, hidden] that the head makes the logits of `forward` from:
        after the last norm. `logits_rows` ascend.
        """

    @abstractmethod
    def logits(self, hidden: Tensor, adapters: "TokenAdapters | None" = None) -> Tensor:
        """Logits [N, V] of any of the rows of `hidden`, which have these `adapters`."""


def collect_modules() -> None:
    """Free the modules of a model, which know each other; of a process that has `gc.freeze` done
    since they were made as well.
    """
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
