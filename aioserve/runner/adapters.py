"""LoRA adapters as the core knows them: which tokens of a step have some, where a model takes them.

How an adapter is read, laid out and multiplied is known by the part that brings adapters; a model
that has none, and a step without them, load nothing of it. Knows modules, tokens and places.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from aioserve.support.parts import Brought

if TYPE_CHECKING:
    from aioserve.runner.interface import AdapterFiles

Place: TypeAlias = Hashable  # a product of a model, by whatever it calls it


class TokenAdapters(ABC):
    """The adapters of T tokens, where these are computed."""

    @abstractmethod
    def add(self, place: Place, x: Tensor, out: Tensor) -> None:
        """Add what adapters have to `out` [T, out], which a product made of `x` [T, in]."""

    @abstractmethod
    def embed(self, ids: Tensor, out: Tensor) -> None:
        """Add what adapters have to `out` [T, hidden], the embeddings of `ids` [T]."""


class AdapterOwners(ABC):
    """The adapter that each of T tokens has, as the host knows it."""

    @abstractmethod
    def take(self, rows: npt.NDArray[np.integer]) -> "AdapterOwners":
        """Return the owners of these rows alone."""

    @abstractmethod
    def on_cpu(self) -> TokenAdapters:
        """Return the adapters of tokens that are computed on the CPU."""


# Where a model takes adapters: which of its modules, how large they are, where their outputs go.


class Site(NamedTuple):
    """A linear module: a part of the outputs of a product."""

    place: Place
    begin: int  # of its outputs that are here, among those of the product
    num_outputs: int
    num_inputs: int
    outputs: slice = slice(None)  # those that this rank has of a module that ranks share
    inputs: slice = slice(None)


@dataclass(frozen=True, kw_only=True)
class AdapterSites:
    """The places of one model that can have LoRA adapters. Used from any thread."""

    #: A linear module by its name; None if there is none of that name that can have adapters.
    find: Callable[[str], Site | None]
    dtype: torch.dtype
    device: torch.device
    #: Tokens and hidden size of the embedding; None if that cannot have adapters.
    table_shape: tuple[int, int] | None
    rows_of_table: Callable[[Tensor], Tensor]  # [N, hidden], by token ids [N]
    head: Callable[[Tensor], Tensor]  # logits of hidden states, those of this rank
    is_table: Callable[[str], bool]  # whether a name means the embedding
    #: What computes the products of adapters: torch, or the compiled kernels as far as they go.
    products: Literal["torch", "kernels"] = "torch"


# What the part makes for a model.


class AdapterHooks(ABC):
    """The adapters of a model that runs as `transformers` wrote it."""

    @abstractmethod
    def finding(self, num_tokens: int, states: Any = None) -> AbstractContextManager[None]:
        """The model is run in here on `num_tokens` tokens: see which modules they pass. What is
        in layers with `states` is called with others in steps.
        """

    @abstractmethod
    def used(
        self, tokens: TokenAdapters | None, sampling: TokenAdapters | None
    ) -> AbstractContextManager[None]:
        """The model is run in here: `tokens` of what passes through all of it but the head,
        `sampling` of what passes through that.
        """

    @abstractmethod
    def sites(self, head: Callable[[Tensor], Tensor]) -> AdapterSites:
        """Return the places that were found; `head` as in `AdapterSites`."""


class DecoderAdapters(ABC):
    """Adapters as the one call of a compiled decoder takes them."""

    @abstractmethod
    def serves(self, tokens: TokenAdapters) -> bool:
        """Return whether the kernels serve all adapters of the tokens."""

    @abstractmethod
    def structs(self, *rows: TokenAdapters | None) -> tuple[Any, ...]:
        """Return for each of `rows` an array of structs, then for each how many there are."""


class LoadedAdapters(ABC):
    """Loads and drops the adapters of a runner with a model and a batch."""

    @property
    @abstractmethod
    def loaded(self) -> Mapping[str, object]:
        """Those of which requests may come, by id."""

    @abstractmethod
    def put(self, files: "AdapterFiles") -> object:
        """Put an adapter where the model computes, from any thread. Raises `ConfigError` that names
        the first module that does not fit: it was made for another model.
        """

    @abstractmethod
    def load(self, adapter_id: str, adapter: object) -> None:
        """Requests of this adapter id may come from now on, with what `put` made."""

    @abstractmethod
    def unload(self, adapter_id: str) -> None:
        """Forget an adapter: no request of its id comes any more."""


_ADAPTERS = Brought[Any]("adapters")


def make_hooks(module: nn.Module) -> AdapterHooks:
    """Hooks on `module`, a causal language model of `transformers`."""
    made: AdapterHooks = _ADAPTERS["hooks"](module)
    return made


def make_decoder_adapters(num_layers: int) -> DecoderAdapters:
    """Return what the one call of a decoder of `num_layers` fused layers is given."""
    made: DecoderAdapters = _ADAPTERS["decoder"](num_layers)
    return made


def make_loaded(sites: AdapterSites, rows: Any) -> LoadedAdapters:
    """No adapter is loaded yet. `rows` is the part of the batch for adapters."""
    made: LoadedAdapters = _ADAPTERS["loaded"](sites, rows)
    return made
