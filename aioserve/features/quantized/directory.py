"""A Hugging Face directory whose weights are in few bits, or are to be as they are loaded.

Weights are read one after another, so that beside what is kept there is only one as numbers. How
numbers are rounded is known by the package. Last, what GPTQ, AWQ, compressed-tensors, FP8 and MXFP4
write: which tensors make one weight and what their numbers mean; what is whole numbers times scales
becomes a format of the package, the rest float32. That part knows no architecture and no files.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from aioserve.errors import ConfigError, one_line
from aioserve.features.quantized import (
    bytes_in_memory,
    format_of,
    keeps_numbers,
    quantize,
    quantize_experts,
    quantize_linears,
)
from aioserve.model_source.directory import Directory
from aioserve.model_source.quantized_weight import QuantizedWeight, attach, stand_in
from aioserve.model_source.source import Rounding

logger = logging.getLogger(__name__)


class QuantizedDirectory(Directory):
    """A directory with a `quantization_config`, or one that is read by a `Rounding`."""

    @property
    def is_quantized(self) -> bool:
        return bool(self.quantization_config)

    def num_bytes(
        self, itemsize: int, *, keeps_blocks: bool = False, rounding: Rounding | None = None
    ) -> float:
        def rounded(name: str, shape: tuple[int, ...]) -> str | None:
            if rounding is None or len(shape) != 2 or shape[1] % format_of(rounding.inner).inputs:
                return None
            # Experts lie in memory as they are stored until all of them are put together.
            is_kept = ".experts." in name or keeps_numbers(name)
            inner = None if is_kept else rounding.inner
            return rounding.outer if "embed" in name else inner

        total = 0.0
        with ExitStack() as files:
            stored, plain = self._find_weights(files)
            kinds = [(w.shape, w.kind if keeps_blocks else None) for w in stored.values()]
            shapes = ((name, tuple(tensor.get_shape())) for name, tensor in plain.items())
            kinds += ((shape, rounded(name, shape)) for name, shape in shapes)
        for shape, kind in kinds:
            total += math.prod(shape) * (itemsize if kind is None else bytes_in_memory(kind))
        return total

    def stored_kinds(self, outline: Any) -> Mapping[str, str]:
        with ExitStack() as files:
            return kinds_of(self._find_weights(files)[0], outline)

    @contextmanager
    def open_weights(self) -> Iterator[dict[str, Callable[[], Any]]]:
        def read(weight: Stored) -> Any:
            found = weight.read()
            return found if isinstance(found, torch.Tensor) else found.dequantize(torch.float32)

        with ExitStack() as files:
            stored, plain = self._find_weights(files)
            yield {name: partial(read, weight) for name, weight in stored.items()} | {
                name: partial(tensor.__getitem__, ...) for name, tensor in plain.items()
            }

    def quantize(self, module: Any, rounding: Rounding) -> None:
        quantize_linears(module, rounding)
        quantize_experts(module, rounding.inner)

    def _load(
        self,
        dtype: Any,
        device: Any,
        attn_implementation: str | None,
        keeps_blocks: bool,
        rounding: Rounding | None,
    ) -> tuple[Any, Any]:
        if rounding is None and not self.quantization_config:
            return super()._load(dtype, device, attn_implementation, keeps_blocks, rounding)
        from transformers import AutoModelForCausalLM

        config = self.read_config()
        for part in (config, config.get_text_config(decoder=True)):
            vars(part).pop("quantization_config", None)  # `transformers` would want its readers
        arguments = {"dtype": dtype, "attn_implementation": attn_implementation}
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(
                config, trust_remote_code=self.trust_remote_code, **arguments
            )
        parts = {f"{name}.weight": part for name, part in outline.named_modules()}
        names = ModuleNames(outline)
        outer = {id(outline.get_input_embeddings()), id(outline.get_output_embeddings())}
        kept: dict[int, tuple[str, QuantizedWeight, Any]] = {}  # by where its stand-in lies
        unpacked: list[str] = []

        def part_of(name: str) -> Any:
            """Return the matrix that has the weight of this name."""
            part = parts.get(names.find(name) or "")
            return part if type(part) in (nn.Linear, nn.Embedding) else None

        def keep(name: str, weight: QuantizedWeight) -> Any:
            tensor = stand_in(weight.shape, dtype)
            kept[tensor.data_ptr()] = (name, weight, tensor)
            return tensor

        def read(name: str, stored: Stored) -> Any:
            try:
                weight = stored.read()
            except ConfigError as error:
                raise ConfigError(f"cannot load {name} in {self.path}: {error}") from None
            if isinstance(weight, QuantizedWeight) and keeps_blocks and part_of(name):
                return keep(name, weight)
            unpacked.append(name)
            whole = weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight
            return whole.to(dtype)

        def round_off(name: str, tensor: Any) -> Any:
            shape, part = tensor.get_shape(), part_of(name)
            if rounding is None or part is None or keeps_numbers(names.find(name) or name):
                return tensor[...]
            if type(part) is nn.Embedding and id(part) not in outer:  # of positions
                return tensor[...]
            group = format_of(rounding.inner).inputs
            if shape[1] % group:
                if group > 32:
                    raise ConfigError(
                        f"model.quantization_group_size is {group}, but {name} "
                        f"has {shape[1]} inputs, which is no multiple"
                    )
                return tensor[...]
            kind = rounding.outer if id(part) in outer else rounding.inner
            return keep(name, quantize(tensor[...].to(dtype), kind))

        with ExitStack() as files:
            stored, plain = self._find_weights(files)
            lazy = LazyReads()
            weights = {name: lazy(read, name, weight) for name, weight in stored.items()}
            weights |= {name: lazy(round_off, name, tensor) for name, tensor in plain.items()}
            try:
                module, report = type(outline).from_pretrained(
                    None,
                    config=config,
                    state_dict=weights,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    **arguments,
                )
            except Exception as error:
                raise (lazy.error or error) from None
        if lazy.error is not None:
            raise lazy.error
        for parameter in module.parameters():
            if (found := kept.pop(parameter.data_ptr(), None)) is not None:
                attach(parameter, found[1])
        for name, _, _ in kept.values():
            if id(part_of(name)) not in outer:  # one of these may be tied to the other
                raise ConfigError(f"transformers makes something else of {name} in {self.path}")
        if unpacked:
            logger.info(
                "%s: %d of its %d quantized weights (%s) are unpacked to %s",
                self.path.name,
                len(unpacked),
                len(stored),
                self.quantization_config["quant_method"],
                str(dtype).removeprefix("torch."),
            )
        return module, report

    def _find_weights(self, files: ExitStack) -> "tuple[dict[str, Stored], dict[str, Any]]":
        """Quantized weights, and other tensors, by name; open until `files` are closed."""
        tensors = dict(self._tensors(files))
        if not self.quantization_config:
            return {}, tensors
        try:
            return find_weights(self.quantization_config, tensors)
        except ConfigError as error:
            raise ConfigError(f"cannot load the model in {self.path}: {one_line(error)}") from None


# Weights that `transformers` takes for slices of a file, and that are read when it loads each.
# Knows what a read raised: `transformers` makes a page of it.


class LazyReads:
    """A maker of what `transformers` takes for a slice of a file, and reads by calling us."""

    def __init__(self) -> None:
        self.error: Exception | None = None  # `transformers` makes a page of it
        self._lock = Lock()  # it reads on several threads

    def __call__(self, read: Callable[[str, Any], Any], name: str, what: Any) -> "_LazyTensor":
        return _LazyTensor(self, read, name, what)


class _LazyTensor:
    def __init__(self, lazy: LazyReads, read: Callable[[str, Any], Any], name: str, what: Any):
        self._lazy, self._read, self._name, self._what = lazy, read, name, what

    def __getitem__(self, _: Any) -> Any:
        with self._lazy._lock:
            try:
                return self._read(self._name, self._what)
            except Exception as error:
                self._lazy.error = self._lazy.error or error
                raise


# The names that tensors of files have in a module of `transformers`, which renames and joins some.
# Knows what `transformers` declares of a model; reads no tensor.


class ModuleNames:
    """The names of parameters of one module, by those in files."""

    def __init__(self, module: Any) -> None:
        """`module` may be an outline without numbers."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        transforms = get_model_conversion_mapping(module)
        self._joining = [one for one in transforms if isinstance(one, WeightConverter)]
        self._renaming = [one for one in transforms if not isinstance(one, WeightConverter)]
        self._prefix, self._known = module.base_model_prefix, module.state_dict()

    def find(self, name: str) -> str | None:
        """Return the parameter that the tensor `name` of a file is; None where it becomes
        another.
        """
        from transformers.core_model_loading import rename_source_key

        found, joined = rename_source_key(
            name, self._renaming, self._joining, self._prefix, self._known
        )
        return found if joined is None else None


# Quantized weights as checkpoints write them.


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
) -> "tuple[dict[str, Stored], dict[str, Any]]":
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
    from aioserve.features.quantized import from_codes

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
