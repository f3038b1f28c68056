"""Attention over the paged KV cache: the seam, and the choice of what is behind it.

A backend knows blocks, slots and lengths; it knows nothing about requests or models.
"""

from aioserve.runner.attention.backend import AttentionBackend, KVCacheSpec, LayerSpec, StepInputs

__all__ = ["AttentionBackend", "KVCacheSpec", "LayerSpec", "StepInputs", "create_attention_backend"]


def create_attention_backend(
    spec: KVCacheSpec, num_kv_blocks: int, block_size: int
) -> AttentionBackend:
    """Allocate the KV cache behind the fastest backend that this machine can run."""
    from aioserve.runner.attention.torch_paged import TorchPagedAttention

    return TorchPagedAttention(spec, num_kv_blocks, block_size)
