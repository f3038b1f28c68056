"""Quantized weights in formats of blocks: as bytes, as codes and scales, and as numbers.

The formats are those of GGUF, and groups of any size for what others write and `--quantization`
makes. Knows bytes and arithmetic; knows nothing about files or the kernels that multiply.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aioserve.errors import ConfigError
from aioserve.model_source.source import Rounding


class Codes(NamedTuple):
    """A weight [out, in] as small numbers: `scale * code + offset`, G groups of inputs per output.

    `values` are signed bytes [out, in], those of 4 bits from 0 to 15. `scales` and `offsets` are
    float16 [out, G]; or signed bytes, times float16 `supers` and `super_offsets` [out, G / n], of
    which each serves n groups. Without `offsets` they are `-zero * scale`.
    """

    bits: int
    values: Tensor
    scales: Tensor
    offsets: Tensor | None = None
    supers: Tensor | None = None
    super_offsets: Tensor | None = None
    zero: int = 0

    def dequantize(self) -> Tensor:
        """The weight in float32: as the package gguf computes it, to the bit."""
        scales = _times(self.scales, self.supers)
        grouped = self.values.view(*scales.shape, -1)
        weight = grouped * scales[..., None]
        if self.offsets is not None:
            weight += _times(self.offsets, self.super_offsets)[..., None]
        elif self.zero:
            weight = (grouped - self.zero) * scales[..., None]
        return weight.view(self.values.shape)


class QuantizedWeight:
    """A weight [out, in] in a format, as its bytes."""

    def __init__(self, kind: str, data: Tensor) -> None:
        """`kind` is a name that `format_of` knows; `data`: uint8 [out, bytes of a row]."""
        self.kind, self.data = kind, data
        per_block, block_bytes, _ = format_of(kind)
        self.shape = (data.shape[0], data.shape[1] // block_bytes * per_block)

    @property
    def num_elements(self) -> int:
        return self.shape[0] * self.shape[1]

    def codes(self) -> Codes:
        per_block, block_bytes, decode = format_of(self.kind)
        return decode(self.data.view(self.shape[0], self.shape[1] // per_block, block_bytes))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All of it, a few rows at a time."""
        out = torch.empty(self.shape, dtype=dtype)
        step = max(1, _PIECE // self.shape[1])
        for start in range(0, self.shape[0], step):
            out[start : start + step] = self.rows(slice(start, start + step)).codes().dequantize()
        return out

    def rows(self, index: Tensor | slice) -> "QuantizedWeight":
        return QuantizedWeight(self.kind, self.data[index])


_PIECE = 1 << 15  # weights: few enough that torch calls no second thread, which would cost more


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A weight [out, in] that takes no memory, for a parameter that has one `attached`: all of its
    rows are the same numbers, so that a model goes through, to no purpose.
    """
    return torch.linspace(-1, 1, shape[1]).mul_(shape[1] ** -0.5).to(dtype).expand(shape)


def attach(parameter: Tensor, weight: QuantizedWeight) -> None:
    """Note what a parameter stands in for."""
    parameter.quantized_weight = weight  # type: ignore[attr-defined]


def attached(parameter: Tensor) -> QuantizedWeight | None:
    """What a parameter stands in for, if for anything."""
    return getattr(parameter, "quantized_weight", None)


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


class StoredExperts(NamedTuple):
    """The weights [out, in] of all experts of a layer, of which a parameter has none."""

    weights: list[QuantizedWeight]
    is_transposed: bool  # whether the parameter is [experts, in, out]

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The numbers that stand in for each expert: kernels of torch want one with strides."""
        return stand_in(self.weights[0].shape, dtype).contiguous()

    def stand_in(self, matrix: Tensor) -> nn.Parameter:
        """A parameter of which all experts are the same `matrix`, which other layers may share."""
        whole = matrix.expand(len(self.weights), *matrix.shape)
        parameter = nn.Parameter(whole.transpose(1, 2) if self.is_transposed else whole, False)
        parameter.stored_experts = self  # type: ignore[attr-defined]
        parameter.quantized_experts = self.weights  # type: ignore[attr-defined]
        return parameter

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All numbers, as the parameter has them."""
        whole = torch.stack([weight.dequantize(dtype) for weight in self.weights])
        return whole.transpose(1, 2).contiguous() if self.is_transposed else whole


def stored_experts(parameter: Tensor) -> StoredExperts | None:
    """The experts that a parameter stands in for, if it does."""
    return getattr(parameter, "stored_experts", None)


def stands_in(parameter: Tensor) -> bool:
    """Whether a parameter has no numbers, but something that is quantized has."""
    return attached(parameter) is not None or stored_experts(parameter) is not None


def unpacked(parameter: Tensor) -> Tensor:
    """The numbers of a parameter, or of what it stands in for."""
    weight = attached(parameter) or stored_experts(parameter)
    return parameter.data if weight is None else weight.dequantize(parameter.dtype)


def _standing_in(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of this module, without its parts, that have no numbers."""
    own = module.named_parameters(recurse=False)
    return {name: parameter for name, parameter in own if stands_in(parameter)}


@contextmanager
def unpacked_in_turn(module: nn.Module) -> Iterator[None]:
    """Meanwhile `module` computes with what its parameters stand in for, unpacked one by one."""

    def unpack(part: nn.Module, _: Any) -> None:
        standing_in[part] = _standing_in(part)
        for name, parameter in standing_in[part].items():
            setattr(part, name, nn.Parameter(unpacked(parameter), requires_grad=False))

    def forget(part: nn.Module, _: Any, __: Any) -> None:
        for name, parameter in standing_in.pop(part).items():
            setattr(part, name, parameter)

    standing_in: dict[nn.Module, dict[str, nn.Parameter]] = {}
    handles: list[Any] = []
    for part in filter(_standing_in, module.modules()):
        handles += (
            part.register_forward_pre_hook(unpack),
            part.register_forward_hook(forget, always_call=True),
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def unpack_all(module: nn.Module) -> None:
    """Give all parameters of `module` the numbers of what they stand in for."""
    whole: dict[Tensor, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in _standing_in(part).items():
            if parameter not in whole:  # a tied one stays one
                whole[parameter] = nn.Parameter(unpacked(parameter), requires_grad=False)
            setattr(part, name, whole[parameter])


def _times(numbers: Tensor, supers: Tensor | None) -> Tensor:
    if supers is None:
        return numbers.float()
    return (numbers.view(*supers.shape, -1) * supers.float()[..., None]).flatten(1)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """The float16 number at an even byte of every block [out, blocks, bytes]: [out, blocks]."""
    return blocks.view(torch.float16)[..., at // 2]


def _nibbles(data: Tensor) -> Tensor:
    """The low halves of the last dimension's bytes, then the high ones."""
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


class Format(NamedTuple):
    """How a type of GGUF lies in blocks of some inputs of an output."""

    inputs: int
    num_bytes: int
    decode: Callable[[Tensor], Codes]  # of uint8 [out, blocks, num_bytes]


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
    """One of `FORMATS`, or `int4/128` or the like: bits, and the inputs that share a scale, a
    multiple of 32. With `uint` a group has an offset as well. Raises `ValueError` for other names.
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
    """Of one weight of this format where the kernels multiply with it."""
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
    return QuantizedWeight(f"{'u' * has_offset}int{bits}/{group}", data)


def quantize(weight: Tensor, kind: str) -> QuantizedWeight:
    """The nearest weight [out, in] in "Q8_0", "Q4_0", "int8/GROUP" or "int4/GROUP", to which `in`
    is a multiple. A few rows at a time.
    """
    num_outputs, num_inputs = weight.shape
    per_block, num_bytes, _ = format_of(kind)
    data = torch.empty(num_outputs, num_inputs // per_block, num_bytes, dtype=torch.uint8)
    step = max(1, _PIECE // num_inputs)
    for start in range(0, num_outputs, step):
        rows = weight[start : start + step].float().view(-1, *data.shape[1:2], per_block)
        data[start : start + step] = _rounded(rows, kind.startswith(("Q8", "int8")))
    return QuantizedWeight(kind, data.flatten(1))


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
    """Whether the linear layer of this name, or its weight, is not to be quantized."""
    return not (_KEPT | _ROUTERS).isdisjoint(name.split("."))


def weights_of_experts(module: nn.Module) -> tuple[str, ...]:
    """The names of the weights [experts, ...] of a layer's experts, first and second product, where
    `module` has them as `transformers` has most; else none.
    """
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return ()
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    found = (getattr(module, name, None) for name in names)
    return names if all(isinstance(one, Tensor) and one.dim() == 3 for one in found) else ()


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


def has_quantized_layers(module: Any) -> bool:
    """Whether anything but embedding and head of a causal language model is quantized."""
    outer = (module.get_input_embeddings(), module.get_output_embeddings())
    shared = {id(part.weight) for part in outer if part is not None}
    return any(
        id(p) not in shared and (attached(p) or quantized_experts(p)) for p in module.parameters()
    )


def told_of_weights(module: nn.Module) -> tuple[str, int]:
    """The formats of all quantized weights of `module`, in words, and their bytes."""
    stored: dict[int, QuantizedWeight] = {}  # one for what is tied
    for parameter in module.parameters():
        own = [attached(parameter), *(quantized_experts(parameter) or ())]
        stored |= {id(weight): weight for weight in own if weight is not None}
    kinds = sorted({weight.kind for weight in stored.values()})
    return ", ".join(kinds), sum(weight.data.numel() for weight in stored.values())


def quantized_experts(parameter: Tensor) -> list[QuantizedWeight] | None:
    """The weights [out, in] of each expert in few bits, if they were rounded to these."""
    return getattr(parameter, "quantized_experts", None)


def _quantized_each(weight: Tensor, kind: str, is_transposed: bool) -> Iterator[QuantizedWeight]:
    for numbers in weight:
        own = numbers.T if is_transposed else numbers
        small = quantize(own.contiguous(), kind)
        own.copy_(small.dequantize(own.dtype))
        yield small


def _fits(name: str, num_inputs: int, kind: str) -> bool:
    """Whether inputs are whole groups; those of 32 leave alone what does not fit."""
    group = format_of(kind).inputs
    if num_inputs % group and group > 32:
        raise ConfigError(
            f"model.quantization_group_size is {group}, but {name} has {num_inputs} inputs, which "
            "is no multiple"
        )
    return num_inputs % group == 0
