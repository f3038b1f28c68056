"""Attention over a paged KV cache: the seam, and where models of `transformers` meet it.

Whatever computes it knows blocks, slots and lengths; it knows nothing about requests or models.
"""

from aioserve.runner.attention.backend import (
    AttentionOptions,
    KVCacheSpec,
    LayerAttention,
    LayerSpec,
    StepInputs,
)

__all__ = ["AttentionOptions", "KVCacheSpec", "LayerAttention", "LayerSpec", "StepInputs"]
