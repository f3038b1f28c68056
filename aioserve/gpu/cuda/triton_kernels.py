"""Triton kernels of the device path: of a fused decoder layer, and of sampling.

Norms, gate, and what comes between qkv and attention; a draw per row of logits, and the limits of
top-k and top-p. Float32 inside, one rounding at the end. The interpreter (TRITON_INTERPRET=1) runs
all of it without a card.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioserve.gpu.cuda.sampler import DrawColumns

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


# Triton kernels of the device path: a draw per row of logits, and the limits of top-k and top-p.
# The noise is that of `batch.sampling_columns`, bit for bit. Imported only where Triton is; knows
# tensors, nothing about requests. TRITON_INTERPRET=1 runs all of it without a card.


CHUNK = 4096  # logits of one program: 38 programs for a vocabulary of 152k, a guess


@triton.jit
def mix(x):
    """Hash uint32 words, bit for bit as `sampling_columns.mix` on the host does (lowbias32)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def uniform(key0, key1, token_ids):
    """Return `sampling_columns.uniform(hash_tokens(...))` for uint32 keys and token ids."""
    words = mix(mix(token_ids + key0) ^ key1)
    return ((words >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit(do_not_specialize=["num_rows"])  # else new numbers compile while serving
def _uniform_kernel(keys, out, num_rows, size, BLOCK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    key0 = tl.load(keys + row).to(tl.uint32, bitcast=True)
    key1 = tl.load(keys + num_rows + row).to(tl.uint32, bitcast=True)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * size + token, uniform(key0, key1, token.to(tl.uint32)), mask=token < size)


@triton.jit(do_not_specialize=["num_rows"])  # else new numbers compile while serving
def _draw_kernel(
    logits, highest, temperature, floor, keys, scores, tokens, num_rows, size, BLOCK: tl.constexpr
):
    """The best score of one chunk of one row, and whose it is."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    token = chunk * BLOCK + tl.arange(0, BLOCK)
    inside = token < size
    x = tl.load(logits + row.to(tl.int64) * size + token, mask=inside, other=float("-inf"))
    x = x.to(tl.float32) - tl.load(highest + row)
    heat = tl.load(temperature + row)
    if heat > 0:
        x = tl.div_rn(x, heat)  # rounded as on the CPU; a plain division need not be
        key0 = tl.load(keys + row).to(tl.uint32, bitcast=True)
        key1 = tl.load(keys + num_rows + row).to(tl.uint32, bitcast=True)
        noise = -tl.log(-tl.log(uniform(key0, key1, token.to(tl.uint32))))
        x = tl.where(x >= tl.load(floor + row), x + noise, float("-inf"))
    place = tl.argmax(x, axis=0)
    chunks = tl.num_programs(1)
    tl.store(scores + row * chunks + chunk, tl.max(x, axis=0))
    tl.store(tokens + row * chunks + chunk, chunk * BLOCK + place)


@triton.jit
def _ordered(bits):
    """Float bits (int32) as integers in the order of the floats, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _limit_kernel(
    logits, highest, temperature, top_k, top_p, min_p_floor, floor, size, BLOCK: tl.constexpr
):
    """The smallest scaled logit of one row that top-k, then top-p, then min-p keep.

    Both limits are the smallest v for which what lies above v is too little: fewer than k tokens,
    less than p of the mass. So each is found by bisection over the floats, 32 passes over the row.
    """
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * size
    top, heat = tl.load(highest + row), tl.load(temperature + row)
    k, p = tl.load(top_k + row), tl.load(top_p + row)
    lowest = tl.full((), -float("inf"), tl.float32)
    if heat > 0:
        if k > 0:
            low = _ordered(lowest.to(tl.int32, bitcast=True))
            high = tl.full((), 0, tl.int32)
            while low < high:  # the answer is in [low, high]: the scaled top itself is 0
                middle = low + ((high - low) >> 1)
                value = _ordered(middle).to(tl.float32, bitcast=True)
                above = tl.full((), 0, tl.int32)
                for begin in range(0, size, BLOCK):
                    at = begin + tl.arange(0, BLOCK)
                    x = tl.load(base + at, mask=at < size, other=float("-inf")).to(tl.float32)
                    above += tl.sum((tl.div_rn(x - top, heat) > value).to(tl.int32), axis=0)
                if above < k:
                    high = middle
                else:
                    low = middle + 1
            lowest = _ordered(low).to(tl.float32, bitcast=True)
        if p < 1:
            mass = tl.full((), 0, tl.float64)
            for begin in range(0, size, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                x = tl.load(base + at, mask=at < size, other=float("-inf")).to(tl.float32)
                x = tl.div_rn(x - top, heat)
                weight = tl.where(x >= lowest, tl.exp(x.to(tl.float64)), 0.0)
                mass += tl.sum(weight, axis=0)
            target = p.to(tl.float64) * mass
            low = _ordered(lowest.to(tl.int32, bitcast=True))
            high = tl.full((), 0, tl.int32)
            while low < high:
                middle = low + ((high - low) >> 1)
                value = _ordered(middle).to(tl.float32, bitcast=True)
                over = tl.full((), 0, tl.float64)
                for begin in range(0, size, BLOCK):
                    at = begin + tl.arange(0, BLOCK)
                    x = tl.load(base + at, mask=at < size, other=float("-inf")).to(tl.float32)
                    x = tl.div_rn(x - top, heat)
                    over += tl.sum(tl.where(x > value, tl.exp(x.to(tl.float64)), 0.0), axis=0)
                if over < target:
                    high = middle
                else:
                    low = middle + 1
            lowest = _ordered(low).to(tl.float32, bitcast=True)
    tl.store(floor + row, tl.maximum(lowest, tl.load(min_p_floor + row)))


def uniforms(keys: Tensor, size: int) -> Tensor:
    """Noise in (0, 1), float32 [S, size], for `keys` int32 [2, S]."""
    num_rows = keys.shape[1]
    out = torch.empty(num_rows, size, dtype=torch.float32, device=keys.device)
    grid = (num_rows, triton.cdiv(size, CHUNK))
    _uniform_kernel[grid](keys, out, num_rows, size, BLOCK=CHUNK)
    return out


def limits(logits: Tensor, highest: Tensor, columns: DrawColumns) -> Tensor:
    """Return the smallest scaled logit that each row keeps, float32 [S]."""
    floor = torch.empty_like(highest)
    _limit_kernel[(len(logits),)](
        logits,
        highest,
        columns.temperature,
        columns.top_k,
        columns.top_p,
        columns.min_p_floor,
        floor,
        logits.shape[1],
        BLOCK=CHUNK,
    )
    return floor


def draw(logits: Tensor, columns: DrawColumns) -> Tensor:
    """Draw as `sampler.draw` does, in two kernels, three where a row has limits."""
    logits = logits.contiguous()
    (num_rows, size), device = logits.shape, logits.device
    highest = logits.amax(dim=-1).float()
    floor = columns.min_p_floor
    if columns.is_limited:
        floor = limits(logits, highest, columns)
    num_chunks = triton.cdiv(size, CHUNK)
    scores = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    tokens = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=device)
    _draw_kernel[(num_rows, num_chunks)](
        logits,
        highest,
        columns.temperature,
        floor,
        columns.keys,
        scores,
        tokens,
        num_rows,
        size,
        BLOCK=CHUNK,
    )
    return tokens.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0]
