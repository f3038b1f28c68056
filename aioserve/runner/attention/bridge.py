"""Where `transformers` modelling code meets the attention backend.

Registers one attention function, by name and without a mask function, so no mask is ever built.
Knows module conventions of `transformers`; knows nothing about blocks or scheduling.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from aioserve.runner.attention.backend import (
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


class AttentionHandler(Protocol):
    """Whoever answers the attention calls of a forward pass."""

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> Tensor:
        """`query` [1, Hq, T, D], `key` and `value` [1, Hkv, T, D] -> [1, T, Hq, Dv]."""


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
    return _serving.handler(
        module, query, key, value, attention_mask=attention_mask, **kwargs
    ), None


AttentionInterface.register(ATTN_IMPLEMENTATION, _dispatch)


class PagedAttentionHandler:
    """Hands every attention call to the backend, under the number of its layer."""

    def __init__(self, modules: list[nn.Module], backend: LayerAttention) -> None:
        self._layers = {module: layer for layer, module in enumerate(modules)}
        self._backend = backend

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any
    ) -> Tensor:
        attended = self._backend.forward(
            self._layers[module],
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            _options(query, kwargs),
        )
        return attended[None]


def _options(query: Tensor, arguments: Mapping[str, Any]) -> AttentionOptions:
    """In our words what `transformers` passes to its attention functions."""
    scaling = arguments.get("scaling")
    return AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=arguments.get("sliding_window"),
        softcap=arguments.get("softcap"),
        sinks=arguments.get("s_aux"),
    )


class AttentionCall(NamedTuple):
    """How one layer calls for attention."""

    num_heads: int
    options: AttentionOptions


class AttentionProbe:
    """Records who calls for attention and how, and refuses what we cannot compute."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.queries: list[Tensor] = []
        self.calls: list[AttentionCall] = []
        self._layers: list[LayerSpec] = []

    def spec(self, dtype: torch.dtype) -> KVCacheSpec:
        """The layers seen so far."""
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
        if module in self.modules:
            raise UnsupportedModelError("an attention module is called more than once in one pass")
        if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedModelError("its attention is not causal")
        for name in _UNSUPPORTED_ARGUMENTS:
            if kwargs.get(name) is not None:
                raise UnsupportedModelError(f"its attention uses {name}")
        if key.shape[2] != query.shape[2]:
            raise UnsupportedModelError("its attention looks at something other than the tokens")
        self.modules.append(module)
        self.queries.append(query)
        self.calls.append(AttentionCall(query.shape[1], _options(query, kwargs)))
        self._layers.append(LayerSpec(key.shape[1], key.shape[3], value.shape[3]))
        attended = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return attended.transpose(1, 2).contiguous()
