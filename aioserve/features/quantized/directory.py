"""A Hugging Face directory whose weights are in few bits, or are to be as they are loaded.

Which formats its files have is known by `checkpoint`, how numbers are rounded by `blocks`. Weights
are read one after another, so that beside what is kept there is only one as numbers.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn

from aioserve.errors import ConfigError, one_line
from aioserve.features.quantized.blocks import (
    bytes_in_memory,
    format_of,
    keeps_numbers,
    quantize,
    quantize_experts,
    quantize_linears,
)
from aioserve.features.quantized.checkpoint import Stored, find_weights, kinds_of
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

    def _find_weights(self, files: ExitStack) -> tuple[dict[str, Stored], dict[str, Any]]:
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
