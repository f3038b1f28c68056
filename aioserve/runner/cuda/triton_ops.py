"""Triton kernels of a fused decoder layer: norms, gate, and what comes between qkv and attention.

Float32 inside, one rounding at the end. Knows tensors; the interpreter (TRITON_INTERPRET=1) runs
all of it without a card.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 1024  # numbers of one program; a guess
HEAD_BLOCK = 8  # heads of one program; a guess


@triton.jit
def _norm_kernel(
    x, residual, weight, out, size, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    dtype = out.dtype.element_ty
    wide = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(dtype)
        tl.store(residual + row + at, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    wide = wide / tl.sqrt(tl.sum(wide * wide, axis=0) / size + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, (wide.to(dtype).to(tl.float32) * scale).to(dtype), mask=inside)


@triton.jit
def _gate_kernel(x, out, size, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    if IS_SILU:
        gate = gate / (1 + tl.exp(-gate))
    else:  # gelu by tanh, which is 2 * sigmoid(2 x) - 1
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        gate = gate / (1 + tl.exp(-2 * inner))
    gated = gate.to(dtype).to(tl.float32) * up
    tl.store(out + row * size + at, gated.to(dtype), mask=inside)


@triton.jit
def _rope_store_kernel(
    qkv,
    cos_sin,
    positions,
    slots,
    keys,
    values,
    query_norm,
    key_norm,
    eps,
    num_heads,
    num_kv_heads,
    limit,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
):
    """Some heads of one token: queries turn in place, K and V go to their slot of the cache."""
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF_BLOCK)[None, :]
    first_value = num_heads + num_kv_heads
    inside = (head < first_value + num_kv_heads) & (at < HALF)
    is_query, is_value = head < num_heads, head >= first_value
    row = qkv + token.to(tl.int64) * (first_value + num_kv_heads) * 2 * HALF + head * 2 * HALF
    dtype = qkv.dtype.element_ty
    x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(row + HALF + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORMS:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        factor = (1 / tl.sqrt(squares / (2 * HALF) + eps))[:, None]
        weights = at + 0 * head
        half = at < HALF
        for_queries = tl.load(query_norm + weights, mask=half, other=0.0).to(tl.float32)
        for_keys = tl.load(key_norm + weights, mask=half, other=0.0).to(tl.float32)
        scale = tl.where(is_query, for_queries, for_keys)
        normed = ((x * factor).to(dtype).to(tl.float32) * scale).to(dtype).to(tl.float32)
        x = tl.where(is_value, x, normed)
        for_queries = tl.load(query_norm + HALF + weights, mask=half, other=0.0).to(tl.float32)
        for_keys = tl.load(key_norm + HALF + weights, mask=half, other=0.0).to(tl.float32)
        scale = tl.where(is_query, for_queries, for_keys)
        normed = ((y * factor).to(dtype).to(tl.float32) * scale).to(dtype).to(tl.float32)
        y = tl.where(is_value, y, normed)
    position = tl.load(positions + token)
    angles = cos_sin + position * 2 * HALF
    cos = tl.load(angles + at, mask=at < HALF, other=0.0)
    sin = tl.load(angles + HALF + at, mask=at < HALF, other=0.0)
    turned, turned2 = x * cos - y * sin, y * cos + x * sin
    tl.store(row + at, turned.to(dtype), mask=inside & is_query)
    tl.store(row + HALF + at, turned2.to(dtype), mask=inside & is_query)
    slot = tl.load(slots + token) * num_kv_heads
    x, y = tl.where(is_value, x, turned), tl.where(is_value, y, turned2)
    # what is not finite becomes 0, as in every backend; what fp8 cannot hold, the largest it can
    x, y = tl.where(tl.abs(x) < float("inf"), x, 0.0), tl.where(tl.abs(y) < float("inf"), y, 0.0)
    x, y = tl.clamp(x, -limit, limit), tl.clamp(y, -limit, limit)
    x, y = x.to(keys.dtype.element_ty), y.to(keys.dtype.element_ty)
    is_key = (head >= num_heads) & (head < first_value)
    key_row = keys + (slot + head - num_heads) * 2 * HALF
    value_row = values + (slot + head - first_value) * 2 * HALF
    tl.store(key_row + at, x, mask=inside & is_key)
    tl.store(key_row + HALF + at, y, mask=inside & is_key)
    tl.store(value_row + at, x, mask=inside & is_value)
    tl.store(value_row + HALF + at, y, mask=inside & is_value)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Normalize the rows of `x` [T, hidden] into `out`."""
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    _norm_kernel[(len(x),)](x, x, weight, out, size, eps, HAS_RESIDUAL=False, BLOCK=block)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Add `x` to `residual` in place, and normalize that into `out`; all [T, hidden]."""
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    _norm_kernel[(len(x),)](x, residual, weight, out, size, eps, HAS_RESIDUAL=True, BLOCK=block)


def gate_and_mul(x: Tensor, out: Tensor, *, is_silu: bool) -> None:
    """Write activation(x[:, :I]) * x[:, I:] into `out` [T, I]; silu, or gelu by tanh."""
    size = out.shape[1]
    grid = (len(x), triton.cdiv(size, GATE_BLOCK))
    _gate_kernel[grid](x, out, size, IS_SILU=is_silu, BLOCK=GATE_BLOCK)


def rope_store(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> None:
    """Norm and turn of heads, K and V into the cache.

    `qkv` [T, (Hq + 2 Hkv) * D], whose queries change; `cos_sin` float32 [positions, D]; `keys` and
    `values` [..., Hkv, D] contiguous, of any type; `norms` [D] for queries and keys.
    """
    num_kv_heads, head_dim = keys.shape[-2:]
    half = head_dim // 2
    grid = (len(qkv), triton.cdiv(num_heads + 2 * num_kv_heads, HEAD_BLOCK))
    query_norm, key_norm = norms or (cos_sin, cos_sin)  # not read
    _rope_store_kernel[grid](
        qkv,
        cos_sin,
        positions,
        slots,
        keys,
        values,
        query_norm,
        key_norm,
        eps,
        num_heads,
        num_kv_heads,
        torch.finfo(keys.dtype).max,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        HEADS=HEAD_BLOCK,
        HAS_NORMS=norms is not None,
    )
