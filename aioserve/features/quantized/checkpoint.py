"""Quantized weights as GPTQ, AWQ, compressed-tensors, FP8 and MXFP4 write them in safetensors.

Knows which tensors make one weight and what their numbers mean; what is whole numbers times
scales becomes a format of `quantized`, the rest float32. Knows no architecture and no files.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from aioserve.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from aioserve.model_source.quantized_weight import QuantizedWeight

# What belongs to activations and the KV cache, which are not rounded here.
_IGNORED = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale"),
    *(".output_scale", ".k_scale", ".v_scale", ".q_scale"),
)
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in its word of 4 bits each column lies
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below zero


class _Weights(msgspec.Struct):
    """The fields about the weights of a group that are read."""

    block_structure: tuple[int, int] | None = None
    group_size: int | None = None


class _Group(msgspec.Struct):
    """The fields of a group of compressed-tensors that are read."""

    format: str | None = None
    weights: _Weights | None = None


class _Stated(msgspec.Struct):
    """The types of what is read of a `quantization_config`."""

    bits: int | None = None
    w_bit: int | None = None
    checkpoint_format: str | None = None
    version: str | None = None
    format: str | None = None
    config_groups: dict[str, _Group] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    weight_block_size: tuple[int, int] | None = None


class Stored(NamedTuple):
    """One weight, before it is read."""

    shape: tuple[int, ...]
    kind: str | None  # the format that it is likely to be read in; None: float32
    read: Callable[[], "QuantizedWeight | Tensor"]


class _Reader:
    """Tensors of one checkpoint; what is taken is gone."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        self.config, self._left = config, dict(tensors)

    def names(self, suffix: str) -> Iterator[str]:
        """Return what stands before `suffix` in the names of tensors."""
        names = [name for name in self._left if name.endswith(suffix)]
        return (name.removesuffix(suffix) for name in names)

    def kind(self, name: str) -> str:
        return str(self._left[name].get_dtype())

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, dtypes: str, shape: tuple[int | None, ...] | None = None) -> Any:
        """Return the tensor, not read yet. `None` in its shape stands for any size."""
        if name not in self._left:
            raise ConfigError(f"there is no tensor {name}")
        tensor = self._left.pop(name)
        dtype, found = str(tensor.get_dtype()), tuple(tensor.get_shape())
        if dtype not in dtypes.split():
            raise ConfigError(f"tensor {name} is of type {dtype}, expected is {dtypes}")
        if shape is not None and (
            len(found) != len(shape)
            or any(s is not None and s != f for s, f in zip(shape, found, strict=True))
        ):
            expected = ", ".join("any" if s is None else str(s) for s in shape)
            raise ConfigError(f"tensor {name} has the shape {found}, expected is ({expected})")
        return tensor

    def rest(self) -> dict[str, Any]:
        """Return what is stored as it is used."""
        for name in self._left:
            if self.kind(name) in _FLOAT8:
                raise ConfigError(f"tensor {name} is of type {self.kind(name)}, without scales")
        return {name: t for name, t in self._left.items() if not name.endswith(_IGNORED)}


def find_weights(
    config: Mapping[str, Any], tensors: Mapping[str, Any]
) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Return the weights that `config`, a `quantization_config`, is about, by name; and the tensors
    that are no part of one. `tensors` are slices of safetensors. Raises `ConfigError` that says
    what is not known, missing or of the wrong shape.
    """
    method = str(config.get("quant_method"))
    if method not in _METHODS:
        raise ConfigError(
            f"its quantization_config has quant_method {method!r}; read are {', '.join(_METHODS)}"
        )
    try:
        msgspec.convert(config, _Stated)
    except msgspec.ValidationError as error:
        raise ConfigError(f"its quantization_config cannot be read: {error}") from error
    reader = _Reader(config, tensors)
    weights = dict(_METHODS[method](reader))
    if not weights:
        raise ConfigError(f"its quantization_config says {method}, but no tensor is stored so")
    return weights, reader.rest()


def kinds_of(weights: Mapping[str, Stored], outline: Any) -> dict[str, str]:
    """Return the formats of `weights` by the names of the parameters of `outline`, a module; files
    may name those of its body without the prefix.
    """
    known = {name for name, _ in outline.named_parameters()}
    found = {}
    for name, weight in weights.items():
        whole = name if name in known else f"{outline.base_model_prefix}.{name}"
        if weight.kind is not None and whole in known:
            found[whole] = weight.kind
    return found


def _gptq(reader: _Reader) -> Iterator[tuple[str, Stored]]:
    """[in / n, out] words of n codes; zeros are one less than they mean in all but gptq_v2.

    As in QuantLinear of AutoGPTQ and GPTQModel.
    """
    bits, layout = reader.config.get("bits"), reader.config.get("checkpoint_format", "gptq")
    if bits not in (4, 8) or layout not in ("gptq", "gptq_v2"):
        raise ConfigError(
            f"it is GPTQ of {bits} bits in the layout {layout}; read are 4 and 8 bits in the "
            "layouts gptq and gptq_v2"
        )
    for name in reader.names(".qweight"):
        words = reader.take(f"{name}.qweight", "I32", (None, None))
        num_inputs, num_outputs = words.get_shape()[0] * 32 // bits, words.get_shape()[1]
        scales = reader.take(f"{name}.scales", "F16 BF16 F32", (None, num_outputs))
        num_groups = scales.get_shape()[0]
        zeros = reader.take(f"{name}.qzeros", "I32", (num_groups, num_outputs * bits // 32))
        order = None
        if reader.has(f"{name}.g_idx"):
            order = reader.take(f"{name}.g_idx", "I32 I64", (num_inputs,))

        def read(
            words: Any = words, scales: Any = scales, zeros: Any = zeros, order: Any = order
        ) -> "QuantizedWeight | Tensor":
            codes = _codes(words[...], bits).permute(1, 0, 2).flatten(1)
            offsets = _codes(zeros[...], bits).flatten(1)
            if layout == "gptq":
                offsets = offsets + 1 & (1 << bits) - 1
            group_of = None if order is None else order[...].long()
            return _weight(bits, codes, scales[...].T, offsets.T, group_of)

        is_ordered = bool(reader.config.get("desc_act")) and order is not None
        yield _stored(name, bits, (num_outputs, num_inputs), num_groups, read, not is_ordered)


def _awq(reader: _Reader) -> Iterator[tuple[str, Stored]]:
    """[in, out / 8] words of 8 codes each, in an order of their own.

    As in AutoAWQ's WQLinear_GEMM.
    """
    bits = reader.config.get("bits", reader.config.get("w_bit"))
    version = str(reader.config.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise ConfigError(f"it is AWQ of {bits} bits, version {version}; read are 4 bits, gemm")
    for name in reader.names(".qweight"):
        words = reader.take(f"{name}.qweight", "I32", (None, None))
        num_inputs, num_words = words.get_shape()
        scales = reader.take(f"{name}.scales", "F16 BF16 F32", (None, num_words * 8))
        num_groups = scales.get_shape()[0]
        zeros = reader.take(f"{name}.qzeros", "I32", (num_groups, num_words))

        def read(
            words: Any = words, scales: Any = scales, zeros: Any = zeros
        ) -> "QuantizedWeight | Tensor":
            codes, offsets = (
                _codes(t[...], 4)[..., _AWQ_ORDER].flatten(1).T for t in (words, zeros)
            )
            return _weight(4, codes, scales[...].T, offsets)

        yield _stored(name, 4, (num_words * 8, num_inputs), num_groups, read)


def _compressed_tensors(reader: _Reader) -> Iterator[tuple[str, Stored]]:
    """Words [out, in / n], or numbers of 8 bits as they are. Codes count from the middle.

    As in the compressors pack_quantized and naive_quantized of compressed-tensors.
    """
    groups = list((reader.config.get("config_groups") or {}).values())
    formats = {g.get("format") or reader.config.get("format") for g in groups}
    known = {"pack-quantized", "int-quantized", "float-quantized", "naive-quantized"}
    others = ", ".join(sorted(map(str, formats - known)))
    for extra in ("sparsity_config", "transform_config"):
        stated = reader.config.get(extra) or {}
        if stated and stated.get("format") != "dense":
            others = others or extra
    if others:
        raise ConfigError(
            f"it is compressed-tensors with {others}; read are {', '.join(sorted(known))}, dense"
        )
    for name in reader.names(".weight_packed"):
        words = reader.take(f"{name}.weight_packed", "I32", (None, None))
        shape = tuple(reader.take(f"{name}.weight_shape", "I64 I32", (2,))[...].tolist())
        bits = words.get_shape()[1] * 32 // max(shape[1], 1)
        if bits not in (4, 8) or words.get_shape() != [shape[0], math.ceil(shape[1] * bits / 32)]:
            raise ConfigError(
                f"{name} is {shape} numbers in words of shape {tuple(words.get_shape())}; read are "
                "4 and 8 bits"
            )
        yield _whole_numbers(reader, name, bits, shape, words)
    for name in reader.names(".weight_scale"):
        kind = reader.kind(f"{name}.weight") if reader.has(f"{name}.weight") else ""
        if kind == "I8":
            values = reader.take(f"{name}.weight", "I8", (None, None))
            yield _whole_numbers(reader, name, 8, tuple(values.get_shape()), values)
        else:
            block = next((b for g in groups if (b := _block_of(g.get("weights") or {}))), None)
            yield _float8(reader, name, "weight_scale", block)


def _block_of(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the outputs and inputs that share a scale, if a scheme says that."""
    if weights.get("block_structure"):
        outputs, inputs = weights["block_structure"]
        return outputs, inputs
    return (1, weights["group_size"]) if weights.get("group_size") else None


def _whole_numbers(
    reader: _Reader, name: str, bits: int, shape: tuple[int, ...], stored: Any
) -> tuple[str, Stored]:
    num_outputs, num_inputs = shape
    scales = reader.take(f"{name}.weight_scale", "F16 BF16 F32")
    size = list(scales.get_shape())
    is_one = math.prod(size) == 1
    if not is_one and (len(size) != 2 or size[0] != num_outputs):
        raise ConfigError(
            f"tensor {name}.weight_scale has the shape {tuple(size)}, expected is "
            f"({num_outputs}, any)"
        )
    num_groups = 1 if is_one else size[1]
    zeros = group_of = None
    if reader.has(f"{name}.weight_zero_point"):
        zeros = reader.take(f"{name}.weight_zero_point", "I32 I8")
    if reader.has(f"{name}.weight_g_idx"):
        group_of = reader.take(f"{name}.weight_g_idx", "I32 I64", (num_inputs,))

    def read() -> "QuantizedWeight | Tensor":
        import torch

        numbers = stored[...]
        if numbers.dtype == torch.int8:
            codes = numbers.view(torch.uint8) ^ 128
        else:
            codes = _codes(numbers, bits).flatten(1)[:, :num_inputs]
        offsets = None
        if zeros is not None:
            offsets = zeros[...]
            if offsets.dtype == torch.int32:  # words of outputs
                offsets = _codes(offsets.T.contiguous(), bits).flatten(1)[:, :num_outputs].T
            else:
                offsets = offsets.int() + (1 << bits - 1)
            offsets = offsets.reshape(-1, num_groups).expand(num_outputs, num_groups)
        order = None if group_of is None else group_of[...].long()
        whole = scales[...].reshape(-1, num_groups).expand(num_outputs, num_groups)
        return _weight(bits, codes, whole, offsets, order)

    return _stored(name, bits, shape, num_groups, read, group_of is None)


def _fp8(reader: _Reader) -> Iterator[tuple[str, Stored]]:
    """Numbers of 8 bits, times a scale for a block of them; that is what scale_inv means, too.

    As in the integration finegrained_fp8 of transformers.
    """
    block = tuple(reader.config.get("weight_block_size") or (128, 128))
    for suffix in ("weight_scale_inv", "weight_scale"):
        for name in reader.names(f".{suffix}"):
            yield _float8(reader, name, suffix, block)


def _float8(
    reader: _Reader, name: str, suffix: str, block: tuple[int, ...] | None
) -> tuple[str, Stored]:
    stored = reader.take(f"{name}.weight", " ".join(_FLOAT8), (None, None))
    scales = reader.take(f"{name}.{suffix}", "F32 F16 BF16 F8_E8M0")
    shape, size = tuple(stored.get_shape()), tuple(scales.get_shape())
    if math.prod(size) == 1:
        block = shape
    elif size in ((shape[0],), (shape[0], 1)):
        block = (1, shape[1])
    expected = None
    if block is not None and len(block) == 2 and min(block) > 0:
        expected = tuple(math.ceil(n / b) for n, b in zip(shape, block, strict=True))
    if expected is None or math.prod(expected) != math.prod(size):
        raise ConfigError(
            f"tensor {name}.{suffix} has the shape {size}, which does not fit scales for blocks of "
            f"{block} of {shape}"
        )

    def read() -> "Tensor":
        assert block is not None
        whole = scales[...].float().view(expected)
        for dim in (0, 1):
            whole = whole.repeat_interleave(block[dim], dim).narrow(dim, 0, shape[dim])
        weight: Tensor = stored[...].float() * whole
        return weight

    return f"{name}.weight", Stored(shape, None, read)


def _mxfp4(reader: _Reader) -> Iterator[tuple[str, Stored]]:
    """[experts, out, groups, 16] bytes of two numbers each and a power of two for 32; transposed.

    As in the integration mxfp4 of transformers, for gpt-oss.
    """
    for name in reader.names("_blocks"):
        blocks = reader.take(f"{name}_blocks", "U8", (None, None, None, 16))
        experts, outputs, groups, _ = blocks.get_shape()
        scales = reader.take(f"{name}_scales", "U8", (experts, outputs, groups))

        def read(blocks: Any = blocks, scales: Any = scales) -> "Tensor":
            import torch

            table = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
            data = blocks[...]
            numbers = table[torch.stack((data & 15, data >> 4), dim=-1).flatten(-2).long()]
            whole = torch.ldexp(numbers, scales[...].int()[..., None] - 127)
            return whole.flatten(-2).transpose(1, 2)

        yield name, Stored((experts, groups * 32, outputs), None, read)


_METHODS: dict[str, Callable[[_Reader], Iterator[tuple[str, Stored]]]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _stored(
    name: str,
    bits: int,
    shape: tuple[int, ...],
    num_groups: int,
    read: Callable[[], "QuantizedWeight | Tensor"],
    is_in_order: bool = True,
) -> tuple[str, Stored]:
    """Return a weight of whole numbers, of which each of `num_groups` has as many inputs."""
    if num_groups < 1 or shape[1] % num_groups:
        raise ConfigError(f"{name} has {shape[1]} inputs, which are not {num_groups} equal groups")
    group = shape[1] // num_groups
    kind = f"uint{bits}/{group}" if is_in_order and group % 32 == 0 else None
    return f"{name}.weight", Stored(shape, kind, read)


def _codes(words: "Tensor", bits: int) -> "Tensor":
    """int32 [..., n] as uint8 [..., n, 32 / bits], from the lowest bits up."""
    import torch

    data = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    return data if bits == 8 else torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)


def _weight(
    bits: int,
    codes: "Tensor",
    scales: "Tensor",
    zeros: "Tensor | None",
    group_of: "Tensor | None" = None,
) -> "QuantizedWeight | Tensor":
    """`(codes - zeros) * scales`, quantized if that is exact, else in float32: codes [out, in],
    the others [out, G]. `group_of` [in] says which group an input has, where they are not in order.
    """
    import torch

    from aioserve.features.quantized.blocks import from_codes

    codes, size = codes.contiguous(), codes.shape[1] // scales.shape[1]
    in_order = torch.arange(codes.shape[1]) // size
    if group_of is None or torch.equal(group_of, in_order):
        weight = from_codes(bits, codes, scales, zeros)
        if weight is not None:
            return weight
        group_of = in_order
    if int(group_of.min()) < 0 or int(group_of.max()) >= scales.shape[1]:
        raise ConfigError(f"an input is of group {int(group_of.max())} of {scales.shape[1]}")
    middle: Any = 1 << bits - 1 if zeros is None else zeros.float()[:, group_of]
    weight_as_float: Tensor = (codes.float() - middle) * scales.float()[:, group_of]
    return weight_as_float
