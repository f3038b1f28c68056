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
    WIDTH: tl.constexpr,
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
    key_row = keys + (slot + head - num_heads) * WIDTH
    value_row = values + (slot + head - first_value) * WIDTH
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
    `values` [..., Hkv, W] contiguous, of any type, of which the first D of W are written; `norms`
    [D] for queries and keys.
    """
    num_kv_heads, width = keys.shape[-2:]
    half = cos_sin.shape[1] // 2
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
        WIDTH=width,
        HEADS=HEAD_BLOCK,
        HAS_NORMS=norms is not None,
    )


# Triton kernels of the device path: a draw per row of logits, and the limits of top-k and top-p.
# The noise is that of `batch.sampling_columns`, bit for bit. Imported only where Triton is; knows
# tensors, nothing about requests. TRITON_INTERPRET=1 runs all of it without a card.


CHUNK = 4096  # logits of one program: 38 programs for a vocabulary of 152k, a guess
WAYS, PASSES = 16, 8  # parts of a range, passes of a search: together all 32 bits of a float
LOWEST = tl.constexpr(-2139095041)  # minus infinity, in the order of the floats


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
def _narrowed(
    parts,
    low,
    wanted,
    row,
    num_chunks,
    width,
    BY_MASS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """The beginning of that part of the last range, of `width`, in which the limit of a row is."""
    chunk, way = tl.arange(0, CHUNKS)[:, None], tl.arange(0, WAYS)[None, :]
    at = (row * num_chunks + chunk) * WAYS + way
    above = tl.sum(tl.load(parts + at, mask=chunk < num_chunks, other=0.0), axis=0)
    if BY_MASS:
        wanted *= tl.sum(tl.where(tl.arange(0, WAYS) == 0, above, 0.0), axis=0)
    is_too_low = (tl.arange(0, WAYS) > 0) & (above >= wanted)
    return tl.load(low + row) + width * tl.sum(is_too_low.to(tl.int32), axis=0)


@triton.jit
def _wanted(top_k, top_p, row, BY_MASS: tl.constexpr):
    """The tokens, or the share of the mass, that a row keeps; negative: it keeps all."""
    if BY_MASS:
        p = tl.load(top_p + row)
        return tl.where(p < 1, p, -1.0)
    k = tl.load(top_k + row)
    return tl.where(k > 0, k.to(tl.float32), -1.0)


# Widths as constants would be compiled one by one.
@triton.jit(do_not_specialize=["width", "num_chunks"])
def _above_kernel(
    logits,
    highest,
    temperature,
    top_k,
    top_p,
    lowest,
    parts,
    next_parts,
    low,
    next_low,
    size,
    num_chunks,
    width,
    BY_MASS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    CHUNKS: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What of one chunk of one row lies above the bounds of the parts of a range of floats."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    heat, wanted = tl.load(temperature + row), _wanted(top_k, top_p, row, BY_MASS)
    if (heat > 0) & (wanted >= 0):
        if IS_FIRST:
            begin = tl.full((), LOWEST, tl.int32)
        else:
            begin = _narrowed(
                parts, low, wanted, row, num_chunks, width * WAYS, BY_MASS, CHUNKS, WAYS
            )
        if chunk == 0:
            tl.store(next_low + row, begin)
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * size + at, mask=at < size, other=float("-inf"))
        x = tl.div_rn(x.to(tl.float32) - tl.load(highest + row), heat)
        way = tl.arange(0, WAYS)
        if BY_MASS:
            weight = tl.where(x >= tl.load(lowest + row), tl.exp(x), 0.0)
            above = tl.where(way == 0, tl.sum(weight, axis=0), 0.0)
        else:
            weight = tl.full((BLOCK,), 1.0, tl.float32)
            above = tl.zeros((WAYS,), tl.float32)
        for number in tl.static_range(1, WAYS):
            bound = _ordered(begin + number * width - 1).to(tl.float32, bitcast=True)
            part = tl.sum(tl.where(x > bound, weight, 0.0), axis=0)
            above = tl.where(way == number, part, above)
        tl.store(next_parts + (row * num_chunks + chunk) * WAYS + way, above)


@triton.jit(do_not_specialize=["num_chunks"])
def _lowest_kernel(
    temperature,
    top_k,
    top_p,
    lowest,
    parts,
    low,
    num_chunks,
    BY_MASS: tl.constexpr,
    CHUNKS: tl.constexpr,
    WAYS: tl.constexpr,
):
    """Raise the smallest scaled logit that a row keeps to what the last range holds."""
    row = tl.program_id(0)
    wanted = _wanted(top_k, top_p, row, BY_MASS)
    if (tl.load(temperature + row) > 0) & (wanted >= 0):
        found = _narrowed(parts, low, wanted, row, num_chunks, 1, BY_MASS, CHUNKS, WAYS)
        found = _ordered(found).to(tl.float32, bitcast=True)
        tl.store(lowest + row, tl.maximum(tl.load(lowest + row), found))


def uniforms(keys: Tensor, size: int) -> Tensor:
    """Noise in (0, 1), float32 [S, size], for `keys` int32 [2, S]."""
    num_rows = keys.shape[1]
    out = torch.empty(num_rows, size, dtype=torch.float32, device=keys.device)
    grid = (num_rows, triton.cdiv(size, CHUNK))
    _uniform_kernel[grid](keys, out, num_rows, size, BLOCK=CHUNK)
    return out


def limits(logits: Tensor, highest: Tensor, columns: DrawColumns) -> Tensor:
    """Return the smallest scaled logit that each row keeps, float32 [S], by top-k, then top-p,
    then min-p.

    Both limits are the smallest v for which what lies above v is too little: fewer than k tokens,
    less than p of the mass, in float32. Each is found exactly by a search over the floats: a pass
    over the logits divides the range in 16, and all chunks of all rows work side by side. What
    they find is added in a fixed order, so that equal logits have equal limits in every run.
    """
    num_rows, size = logits.shape
    num_chunks = triton.cdiv(size, CHUNK)
    lowest = torch.full_like(highest, float("-inf"))
    low = torch.empty(2, num_rows, dtype=torch.int32, device=logits.device)
    parts = torch.empty(2, num_rows, num_chunks, WAYS, dtype=torch.float32, device=logits.device)
    heat, top_k, top_p = columns.temperature, columns.top_k, columns.top_p
    more = {"CHUNKS": triton.next_power_of_2(num_chunks), "WAYS": WAYS}
    for by_mass, is_wanted in ((False, columns.has_top_k), (True, columns.has_top_p)):
        if not is_wanted:
            continue
        for number in range(PASSES):
            old, new = number % 2, 1 - number % 2
            _above_kernel[(num_rows, num_chunks)](
                logits,
                highest,
                heat,
                top_k,
                top_p,
                lowest,
                parts[old],
                parts[new],
                low[old],
                low[new],
                size,
                num_chunks,
                WAYS ** (PASSES - 1 - number),
                BY_MASS=by_mass,
                IS_FIRST=number == 0,
                BLOCK=CHUNK,
                **more,
            )
        last = PASSES % 2
        _lowest_kernel[(num_rows,)](
            heat, top_k, top_p, lowest, parts[last], low[last], num_chunks, BY_MASS=by_mass, **more
        )
    return torch.maximum(lowest, columns.min_p_floor)


def draw(logits: Tensor, columns: DrawColumns) -> Tensor:
    """Draw as `sampler.draw` does: the highest logits, the limits if a row has any, the draw."""
    logits = logits.contiguous()
    (num_rows, size), device = logits.shape, logits.device
    highest = logits.amax(dim=-1).float()
    floor = columns.min_p_floor
    if columns.has_top_k or columns.has_top_p:
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
