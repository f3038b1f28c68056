"""Triton kernels of the device path: a draw per row of logits, and the limits of top-k and top-p.

The noise is that of `runner.noise`, bit for bit. Imported only where Triton is; knows tensors,
nothing about requests. The interpreter (TRITON_INTERPRET=1) runs all of it without a card.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from aioserve.runner.cuda.draw import DrawColumns

CHUNK = 4096  # logits of one program: 38 programs for a vocabulary of 152k, a guess


@triton.jit
def mix(x):
    """Hash uint32 words, bit for bit as `noise.mix` on the host does (lowbias32)."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def uniform(key0, key1, token_ids):
    """`noise.uniform(noise.hash_tokens(...))` for uint32 keys and token ids."""
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
    """The smallest scaled logit that each row keeps, float32 [S]."""
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
    """`draw.draw` in two kernels, three where a row has limits."""
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
