"""Attention over the paged KV cache: the seam, and the choice of what is behind it.

A backend knows blocks, slots and lengths; it knows nothing about requests or models.
"""

from aioserve.runner.attention.backend import AttentionBackend, KVCacheSpec, LayerSpec, StepInputs

__all__ = ["AttentionBackend", "KVCacheSpec", "LayerSpec", "StepInputs", "create_attention_backend"]


def create_attention_backend(
    spec: KVCacheSpec, num_kv_blocks: int, block_size: int
) -> AttentionBackend:
    """Allocate the KV cache behind the fastest backend that this machine can run.

    Its `description` says which that is, and why not a faster one.
    """
    from aioserve.kernels import KernelsUnavailableError, load_kernels
    from aioserve.runner.attention.compiled import CompiledAttention
    from aioserve.runner.attention.torch_paged import TorchPagedAttention

    try:
        kernels = load_kernels()
        obstacle = CompiledAttention.why_not(spec)
    except KernelsUnavailableError as error:
        obstacle = str(error)
    if obstacle is None:
        backend: AttentionBackend = CompiledAttention(kernels, spec, num_kv_blocks, block_size)
        backend.description = f"compiled kernels, {kernels.variant}"
    else:
        backend = TorchPagedAttention(spec, num_kv_blocks, block_size)
        backend.description = f"plain torch, without the compiled kernels: {obstacle}"
    return backend
