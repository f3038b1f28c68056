"""Attention of image encoders by the compiled kernels, in place of torch's where it is unmasked.

Every token of an image sees all of them: the kernels take K and V as a KV cache of one block for
each image. What has a mask, or is causal, stays with `transformers`. Knows no images and no steps.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from aioserve.features.multimodal.encoding_pieces import may_stop, rows_at_once
from aioserve.features.multimodal.image_encoder import ImageEncoder
from aioserve.kernels import Kernels, KernelsUnavailableError, load_kernels

NAME = "aioserve_encoder"
MULTIPLE, MAX_HEAD_DIM = 16, 256  # of the sizes of heads that the kernels serve


def use_kernels(encoder: ImageEncoder) -> None:
    """Let an encoder attend by the kernels, where they are as fast as torch."""
    try:
        is_fast = load_kernels().is_fast
    except KernelsUnavailableError:
        return
    if is_fast:
        encoder.attend_by(NAME)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`query` [B, Hq, N, D], `key` and `value` [B, Hkv, L, D] -> [B, N, Hq, D]."""
    kernels = load_kernels()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_plain = attention_mask is None and not causal and kwargs.get("position_bias") is None
    is_like = query.shape[2] == key.shape[2] and value.shape[3] == query.shape[3] <= MAX_HEAD_DIM
    if not (is_plain and is_like and _serves(kernels, query.dtype)):
        found, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return found, None
    return attend(kernels, query, key, value, scaling or query.shape[3] ** -0.5), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def attend(kernels: Kernels, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """`query` [B, Hq, N, D], `key` and `value` [B, Hkv, N, D] -> [B, N, Hq, D]: all of N tokens see
    all of them.
    """
    batch, num_heads, length, dim = query.shape
    if missing := -dim % MULTIPLE:  # zeros, which change neither scores nor what is kept
        query, key, value = (F.pad(states, (0, missing)) for states in (query, key, value))
    packed = query.transpose(1, 2).reshape(batch * length, num_heads, -1)
    if packed.stride(-1) != 1:
        packed = packed.contiguous()
    out = torch.empty(packed.shape, dtype=query.dtype)
    caches = key.contiguous(), value.contiguous()
    per_query = 2 * num_heads * length * packed.shape[2]
    if (at_once := rows_at_once(length, per_query)) == length:
        table, starts, lengths, ends = _rows(batch, length, length)
        kernels.paged_attention(
            *(packed, *caches, table, starts, lengths, out), scaling=scaling, ends=ends
        )
        may_stop(batch * length * per_query)
    else:
        for place in (
            slice(image + begin, image + min(begin + at_once, length))
            for image in range(0, batch * length, length)
            for begin in range(0, length, at_once)
        ):
            some, table = packed[place], torch.tensor([[place.start // length]], dtype=torch.int32)
            _, starts, lengths, ends = _rows(1, len(some), length)
            kernels.paged_attention(
                *(some, *caches, table, starts, lengths, out[place]), scaling=scaling, ends=ends
            )
            may_stop(len(some) * per_query)
    return out.view(batch, length, num_heads, -1)[..., :dim]


def _serves(kernels: Kernels, dtype: torch.dtype) -> bool:
    """Not bfloat16 where AMX is, which torch uses and the attention of the kernels does not."""
    is_amx = kernels.variant == "amx_bf16"
    return dtype in kernels.dtypes and not (is_amx and dtype is torch.bfloat16)


@functools.lru_cache(maxsize=64)
def _rows(batch: int, num_queries: int, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block table, starts of rows, their lengths, and the ends of what their queries see."""
    return (
        torch.arange(batch, dtype=torch.int32)[:, None],
        torch.arange(batch + 1) * num_queries,
        torch.full((batch,), length),
        torch.full((batch * num_queries,), length),
    )
