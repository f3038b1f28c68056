"""Where `transformers` modelling code meets the attention backend.

Registers one attention function, by name and without a mask function, so no mask is ever built.
Knows module conventions of `transformers`; knows nothing about blocks or scheduling.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from aioserve.runner.attention.backend import (
    AttentionCall,
    AttentionOptions,
    KVCacheSpec,
    LayerAttention,
    LayerSpec,
)

ATTN_IMPLEMENTATION = "aioserve"

# What some architectures pass to their attention and we do not compute.
_UNSUPPORTED_ARGUMENTS = ("position_bias", "indices", "block_indices", "head_mask")


class UnsupportedModelError(Exception):
    """The model's attention needs something that paged attention does not do."""


class NotADecoderError(UnsupportedModelError):
    """Nor can its own code serve it, as its tokens depend on more than what came before."""


class AttentionHandler(Protocol):
    """A callable that answers the attention calls of a forward pass."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> Tensor:
        """`query` [1, Hq, T, D], `key` and `value` [1, Hkv, T, D] -> [1, T, Hq, Dv]."""


class LatentForm(Protocol):
    """The other form of an attention module's calls, whose K and V are latent states: of one head,
    and V the beginning of K.
    """

    def turn_query(self, query: Tensor) -> Tensor:
        """Return what asks the latent states as the module's `query` asks its keys."""

    def turn_back(self, attended: Tensor) -> Tensor:
        """Return, of what was found in latent states, what the module would have found in its
        values.
        """


_latents: WeakKeyDictionary[nn.Module, LatentForm] = WeakKeyDictionary()


def attend_in_latents(module: nn.Module, form: LatentForm) -> None:
    """Answer all attention calls of `module`, which gives latent states as K and V, in that
    form.
    """
    _latents[module] = form


_serving = threading.local()


@contextmanager
def serving(handler: AttentionHandler) -> Iterator[None]:
    """Let `handler` answer all attention calls of this thread."""
    # transformers calls a global function by name, and not every model forwards our own keyword
    # arguments to it; a forward pass stays on its thread, so the thread identifies the runner
    _serving.handler = handler
    try:
        yield
    finally:
        _serving.handler = None


def _dispatch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    form = _latents.get(module)
    if form is not None:
        query = form.turn_query(query)
    attended = _serving.handler(module, query, key, value, attention_mask=attention_mask, **kwargs)
    return (attended if form is None else form.turn_back(attended)), None


AttentionInterface.register(ATTN_IMPLEMENTATION, _dispatch)


class AttentionSite(NamedTuple):
    """Properties of an attention module that its calls do not state."""

    layer: int  # of the paged cache: several may share one (Gemma 4)
    chunk: int | None  # as in `AttentionOptions`


class PagedAttentionHandler:
    """A handler that passes every attention call to the backend, under the number of its layer."""

    def __init__(self, sites: Mapping[nn.Module, AttentionSite], backend: LayerAttention) -> None:
        self._sites = sites
        self._backend = backend

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> Tensor:
        site = self._sites[module]
        attended = self._backend.forward(
            site.layer,
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            _options(query, kwargs, site.chunk),
        )
        return attended[None]


class SeenTokens:
    """The cache that modules ask which count their tokens by a cache, not by positions."""

    def __init__(self, positions: Tensor) -> None:
        """`positions` int64 [T], of a packed step."""
        # they add what was seen to 0, 1, ...; so it is told for each token
        self._seen = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return the number of tokens before the first one, as if all T were of one request:
        [T].
        """
        del layer_idx
        return self._seen

    def update(
        self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Nothing is kept: that is done where attention is."""
        del args, kwargs
        return key, value


def _options(
    query: Tensor, arguments: Mapping[str, Any], chunk: int | None = None
) -> AttentionOptions:
    """Return the options of an attention call of `transformers`, in this package's words."""
    scaling = arguments.get("scaling")
    return AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=arguments.get("sliding_window"),
        softcap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
        chunk=chunk,
    )


def _chunk(module: nn.Module) -> int | None:
    """Return tokens of a chunk of the attention; only the mask, which is not built, would
    state it.
    """
    config, index = getattr(module, "config", None), getattr(module, "layer_idx", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or index is None or layer_types[index] != "chunked_attention":
        return None
    size: int | None = getattr(config, "attention_chunk_size", None)
    return size


class AttentionProbe:
    """A probe that records which modules call for attention and how, and refuses what we cannot
    compute.
    """

    def __init__(self) -> None:
        self.sites: dict[nn.Module, AttentionSite] = {}
        self.queries: list[Tensor] = []
        self.calls: list[AttentionCall] = []  # of the layers of the cache
        self._layers: list[LayerSpec] = []
        self._states: list[tuple[Tensor, Tensor]] = []  # K and V of each layer in `_layers`

    @property
    def modules(self) -> list[nn.Module]:
        """The attention modules, in the order of their calls."""
        return list(self.sites)

    def spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """Return the layers seen so far."""
        return KVCacheSpec(tuple(self._layers), dtype)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if attention_mask is not None:
            raise UnsupportedModelError("its attention uses a mask of its own")
        if module in self.sites:
            raise UnsupportedModelError("an attention module is called more than once in one pass")
        if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise NotADecoderError("its attention is not causal")
        for name in _UNSUPPORTED_ARGUMENTS:
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(f"its attention uses {name}")
        if key.shape[2] != query.shape[2]:
            raise UnsupportedModelError("its attention looks at something other than the tokens")
        self.queries.append(query)
        call = AttentionCall(query.shape[1], _options(query, kwargs, _chunk(module)))
        layer = self._layer_of(key, value, call, is_latent=module in _latents)
        self.sites[module] = AttentionSite(layer, call.options.chunk)
        attended = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return attended.transpose(1, 2).contiguous()

    def _layer_of(self, key: Tensor, value: Tensor, call: AttentionCall, *, is_latent: bool) -> int:
        """Return the one that holds these K and V: of an earlier module, if they are the same."""
        for layer, (own_key, own_value) in enumerate(self._states):
            if key is own_key and value is own_value:
                if not _alike(call, self.calls[layer]):
                    raise UnsupportedModelError("layers that share K and V weigh them differently")
                return layer
        self.calls.append(call)
        self._layers.append(LayerSpec(key.shape[1], key.shape[3], value.shape[3], is_latent))
        self._states.append((key, value))
        return len(self._states) - 1


def _alike(call: AttentionCall, other: AttentionCall) -> bool:
    if call.options.sinks is not None or other.options.sinks is not None:
        return False  # each layer has its own
    return call == other
