"""The formats of quantized weights, and how numbers become weights in them.

The formats are those of GGUF, and groups of any size for what others write and `--quantization`
makes. Knows bytes and arithmetic; knows nothing about files or the kernels that multiply.
"""

import re
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from aioserve.errors import ConfigError
from aioserve.model_source.quantized_weight import (
    Codes,
    Format,
    QuantizedWeight,
    attach,
    attached,
    stand_in,
    weights_of_experts,
)
from aioserve.model_source.source import Rounding

_PIECE = 1 << 15  # weights: few enough that torch calls no second thread, which would cost more


def quantized_weight(kind: str, data: Tensor) -> QuantizedWeight:
    """Return a weight in a format that `format_of` knows; `data`: uint8 [out, bytes of a row]."""
    return QuantizedWeight(kind, data, format_of(kind))


def check_whole_groups(name: str, kind: str, num_inputs: int, own: slice) -> None:
    """Raise `ConfigError` unless the inputs of the layer `name` that a rank has are whole groups of
    the format `kind`.
    """
    group = format_of(kind).inputs
    if own.start % group or own.stop % group:
        raise ConfigError(
            f"the {num_inputs} inputs of {name} are quantized in groups of {group}, of which a "
            f"rank's share, inputs {own.start} to {own.stop}, would have parts: "
            "runner.tensor_parallel_size"
        )


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 number at an even byte of every block [out, blocks, bytes]: [out,
    blocks].
    """
    return blocks.view(torch.float16)[..., at // 2]


def _nibbles(data: Tensor) -> Tensor:
    """Return the low halves of the last dimension's bytes, then the high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _bits(data: Tensor, places: list[int], mask: int) -> Tensor:
    """[..., n] bytes to [..., len(places), n]: what lies from each of these bits on."""
    shifts = torch.tensor(places, dtype=torch.uint8)[:, None]
    return (data[..., None, :] >> shifts) & mask


def _rows(values: Tensor) -> Tensor:
    return values.flatten(1).view(torch.int8)


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(8, _rows(blocks[..., 2:].contiguous()), _halves(blocks, 0))


def _q4_0(blocks: Tensor) -> Codes:
    return Codes(4, _rows(_nibbles(blocks[..., 2:])), _halves(blocks, 0), zero=8)


def _q4_1(blocks: Tensor) -> Codes:
    return Codes(4, _rows(_nibbles(blocks[..., 4:])), _halves(blocks, 0), _halves(blocks, 2))


def _fifth_bits(data: Tensor) -> Tensor:
    """[..., 4] bytes, a bit per number, as [..., 32] times 16."""
    bits = _bits(data, list(range(8)), 1).transpose(-1, -2)
    return bits.flatten(-2) << 4


def _q5_0(blocks: Tensor) -> Codes:
    values = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return Codes(8, _rows(values) - 16, _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Codes:
    values = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Codes(8, _rows(values), _halves(blocks, 0), _halves(blocks, 2))


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """8 of each, of 6 bits, in 12 bytes after two float16 numbers: [out, 8 * blocks]."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=-1)
    offsets = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=-1)
    return _rows(scales), _rows(offsets)


def _with_offsets(bits: int, values: Tensor, blocks: Tensor) -> Codes:
    scales, offsets = _scales_and_offsets(blocks)
    return Codes(bits, _rows(values), scales, offsets, _halves(blocks, 0), -_halves(blocks, 2))


def _q4_k(blocks: Tensor) -> Codes:
    values = _bits(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32), [0, 4], 15)
    return _with_offsets(4, values.flatten(2), blocks)


def _q5_k(blocks: Tensor) -> Codes:
    low = _bits(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32), [0, 4], 15).flatten(-3, -2)
    return _with_offsets(
        8, (low | _bits(blocks[..., 16:48], list(range(8)), 1) << 4).flatten(2), blocks
    )


def _q6_k(blocks: Tensor) -> Codes:
    low = _bits(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64), [0, 4], 15).flatten(-2)
    high = _bits(blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32), [0, 2, 4, 6], 3).flatten(
        -2
    )
    values = _rows((low | high << 4).flatten(2)) - 32
    return Codes(8, values, _rows(blocks[..., 192:208].contiguous()), supers=_halves(blocks, 208))


FORMATS = {
    "Q4_0": Format(32, 18, _q4_0),
    "Q4_1": Format(32, 20, _q4_1),
    "Q5_0": Format(32, 22, _q5_0),
    "Q5_1": Format(32, 24, _q5_1),
    "Q8_0": Format(32, 34, _q8_0),
    "Q4_K": Format(256, 144, _q4_k),
    "Q5_K": Format(256, 176, _q5_k),
    "Q6_K": Format(256, 210, _q6_k),
}


def _grouped(bits: int, has_offset: bool, blocks: Tensor) -> Codes:
    """Offsets are a byte, and an empty one: whole numbers of scales."""
    data = blocks[..., 2 + 2 * has_offset :]
    values = _rows(_nibbles(data) if bits == 4 else data.contiguous())
    scales = _halves(blocks, 0)
    if not has_offset:
        return Codes(bits, values, scales, zero=8 if bits == 4 else 0)
    ones = torch.ones(scales.shape, dtype=torch.int8)
    offsets = blocks[..., 2].contiguous().view(torch.int8)
    return Codes(bits, values, ones, offsets, supers=scales, super_offsets=scales)


_GROUPED = re.compile(r"(u?)int([48])/([1-9][0-9]*)")


@cache
def format_of(kind: str) -> Format:
    """Return one of `FORMATS`, or `int4/128` or the like: bits, and the inputs that share a scale,
    a multiple of 32. With `uint` a group has an offset as well. Raises `ValueError` for other
    names.
    """
    if kind in FORMATS:
        return FORMATS[kind]
    found = _GROUPED.fullmatch(kind)
    if found is None or int(found[3]) % 32:
        raise ValueError(f"no format of weights: {kind}")
    bits, group, has_offset = int(found[2]), int(found[3]), bool(found[1])
    num_bytes = 2 + 2 * has_offset + group * bits // 8
    return Format(group, num_bytes, partial(_grouped, bits, has_offset))


@cache
def bytes_in_memory(kind: str) -> float:
    """Return the bytes that one weight of this format takes where the kernels multiply with it."""
    per_block, num_bytes, decode = format_of(kind)
    codes = decode(torch.zeros(1, 1, num_bytes, dtype=torch.uint8))
    numbers = (codes.scales, codes.offsets, codes.supers, codes.super_offsets)
    return codes.bits / 8 + sum(n.nbytes for n in numbers if n is not None) / per_block


def from_codes(
    bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None
) -> QuantizedWeight | None:
    """`(codes - zeros) * scales`, to the bit; None if no format can hold that.

    `codes` are uint8 [out, in], from 0 to 2^bits - 1; `scales` and the whole numbers `zeros` are
    [out, G]. Without `zeros` they are all 2^(bits - 1).
    """
    num_outputs, num_groups = scales.shape
    group, middle = codes.shape[1] // num_groups, 1 << bits - 1
    halves = scales.to(torch.float16)
    if group % 32 or not torch.equal(halves.float(), scales.float()):
        return None
    parts = [halves[..., None].view(torch.uint8)]
    has_offset = zeros is not None and bool((zeros != middle).any())
    blocks = codes.view(num_outputs, num_groups, group)
    if bits == 8:
        blocks = blocks ^ 128  # as signed bytes they are 128 less
    if has_offset:
        assert zeros is not None
        offsets = (0 if bits == 4 else 128) - zeros.to(torch.int32)
        if bool((offsets.to(torch.int8) != offsets).any()):
            return None
        parts += (offsets.to(torch.uint8)[..., None], torch.zeros_like(parts[0][..., :1]))
    if bits == 4:
        low, high = blocks.chunk(2, dim=-1)
        blocks = low | high << 4
    data = torch.cat((*parts, blocks), dim=-1).flatten(1)
    return quantized_weight(f"{'u' * has_offset}int{bits}/{group}", data)


def quantize(weight: Tensor, kind: str) -> QuantizedWeight:
    """Return the nearest weight [out, in] in "Q8_0", "Q4_0", "int8/GROUP" or "int4/GROUP", to which
    `in` is a multiple. A few rows at a time.
    """
    num_outputs, num_inputs = weight.shape
    per_block, num_bytes, _ = format_of(kind)
    data = torch.empty(num_outputs, num_inputs // per_block, num_bytes, dtype=torch.uint8)
    step = max(1, _PIECE // num_inputs)
    for start in range(0, num_outputs, step):
        rows = weight[start : start + step].float().view(-1, *data.shape[1:2], per_block)
        data[start : start + step] = _rounded(rows, kind.startswith(("Q8", "int8")))
    return quantized_weight(kind, data.flatten(1))


def _rounded(blocks: Tensor, is_int8: bool) -> Tensor:
    """Float32 [out, blocks, inputs] as bytes [out, blocks, bytes]: a scale, then the codes."""
    if is_int8:
        scale = blocks.abs().amax(-1, keepdim=True) / 127
    else:  # 4 bits count from -8 to 7: the largest number becomes -8, whatever its sign
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = largest / -8
    scale = scale.to(torch.float16)
    values = torch.where(scale == 0, 0, blocks / scale.float()).round()
    if is_int8:
        data = values.clamp(-127, 127).to(torch.int8).view(torch.uint8)
    else:
        low, high = (values.clamp(-8, 7) + 8).to(torch.uint8).chunk(2, dim=-1)
        data = low | high << 4
    return torch.cat((scale.view(torch.uint8), data), dim=-1)


# Quantizes matrices of a module of `transformers` that lies in memory as numbers. For what is not
# read weight by weight: the text of a vision model, whose files name it in ways of their own, and
# experts, which `transformers` puts together from several weights. Knows modules; knows no file.


#: Parts of names of linear layers that keep their numbers: routers, and what decides how fast
#: states fade; they are small, and what they are off by is felt for long.
_KEPT = {"dt_proj", "in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj"}
_ROUTERS = {"gate", "router", "modality_router", "classifier", "wg", "shared_expert_gate"}


def keeps_numbers(name: str) -> bool:
    """Return whether the linear layer of this name, or its weight, is not to be quantized."""
    return not (_KEPT | _ROUTERS).isdisjoint(name.split("."))


@torch.no_grad()
def quantize_linears(module: Any, rounding: Rounding) -> None:
    """Have embedding and linear layers of a causal language model, if they are not quantized yet,
    stand in for the same in few bits, and free their numbers. Raises `ConfigError` for a layer that
    does not fit the groups.
    """
    outer = (module.get_input_embeddings(), module.get_output_embeddings())
    made: dict[int, nn.Parameter] = {}  # one for what is tied
    for name, part in module.named_modules():
        is_outer = part in outer
        if type(part) not in ((nn.Linear, nn.Embedding) if is_outer else (nn.Linear,)):
            continue  # embeddings of positions, too
        if keeps_numbers(name):
            continue
        kind = rounding.outer if is_outer else rounding.inner
        weight = part.weight
        if attached(weight) is not None or not _fits(name, weight.shape[1], kind):
            continue
        if id(weight) not in made:
            small = quantize(weight.data, kind)
            made[id(weight)] = nn.Parameter(stand_in(small.shape, weight.dtype), False)
            attach(made[id(weight)], small)
        part.weight = made[id(weight)]


@torch.no_grad()
def quantize_experts(module: nn.Module, kind: str) -> None:
    """Quantize the experts of a causal language model; their parameters keep the rounded numbers,
    and `quantized_experts` tells the same in few bits. Raises `ConfigError` as `quantize_linears`.
    """
    for name, part in module.named_modules():
        for own in weights_of_experts(part):
            weight, is_transposed = getattr(part, own), bool(part.is_transposed)
            if _fits(f"{name}.{own}", weight.shape[1 if is_transposed else 2], kind):
                small = list(_quantized_each(weight.data, kind, is_transposed))
                weight.quantized_experts = small


def _quantized_each(weight: Tensor, kind: str, is_transposed: bool) -> Iterator[QuantizedWeight]:
    for numbers in weight:
        own = numbers.T if is_transposed else numbers
        small = quantize(own.contiguous(), kind)
        own.copy_(small.dequantize(own.dtype))
        yield small


def _fits(name: str, num_inputs: int, kind: str) -> bool:
    """Return whether inputs are whole groups; those of 32 leave alone what does not fit."""
    group = format_of(kind).inputs
    if num_inputs % group and group > 32:
        raise ConfigError(
            f"model.quantization_group_size is {group}, but {name} has {num_inputs} inputs, which "
            "is no multiple"
        )
    return num_inputs % group == 0
